"""Settings for the whole suite: eight simulated devices, and ranks never promoted in silence.

LAPACK gets one thread: its threads and XLA's would wait for each other's cores. Most of the suite's
time is compilation of programs that run once, so XLA does not optimize them, unless the caller's
XLA_FLAGS choose a level: `XLA_FLAGS=--xla_backend_optimization_level=3 pytest` tests what users
run. Tests of what depends on optimized code choose it themselves (`helpers.OPTIMIZED`).
"""

import gc
import os
from pathlib import Path
from typing import Any

from jaxlib.version import __version_info__

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # In one piece each: the cores have other workers' programs to compile.
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    )
    if __version_info__ < (0, 11):  # later XLA has no other emitters; these compile 3 times faster
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one worker or run has compiled the others need not: a quarter of a first run's programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache/xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

from tests.cells import ALL_CELLS, COUNT
from tests.registry import Row

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(20_000, 20, 100)  # tracing makes many small objects that live: 6 % of the time


def pytest_make_parametrize_id(val: object) -> str | None:
    return val.name if isinstance(val, Row) else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests that are marked `weekly` to runs with CURVAX_ALL_CELLS.

    The tests of an optimizer, and the others of a file, run in one worker unless their groups say
    otherwise: what one has compiled the next need not.
    """
    weekly = [item for item in items if item.get_closest_marker("weekly") and not ALL_CELLS]
    COUNT["all"] += len(weekly)
    config.hook.pytest_deselected(items=weekly)
    items[:] = [item for item in items if item not in weekly]
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            row = getattr(item, "callspec", None) and item.callspec.params.get("row")
            group = row.name if isinstance(row, Row) else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
    gc.freeze()  # what is imported stays: no collection has to look at it


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each worker of pytest-xdist has collected all tests, and tells how many cells they are."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cells"] = dict(COUNT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNT.clear()
    COUNT.update(getattr(node, "workeroutput", {}).get("cells", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    hint = "" if ALL_CELLS else "; CURVAX_ALL_CELLS=1 runs all"
    terminalreporter.write_line(f"{COUNT['run']:,} of {COUNT['all']:,} cells{hint}")
