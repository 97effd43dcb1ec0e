"""The registry: one row per method, which all suites, the benchmarks and the pages read.

The row of a method is `ROW` in the file with its name. The environment variable `CURVAX_ROWS` names
a folder with more rows, which needs no other registration. `leaders` has rows of recipes, which the
suites run with CURVAX_ALL_CELLS, or if CURVAX_LEADERS names them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import ALL_CELLS

from ._bounds import Step, adam
from ._row import ADAPTIVE, POLICIES, Readme, Row
from .leaders import LEADERS

__all__ = [
    "ADAPTIVE",
    "LEADERS",
    "METHODS",
    "NAMED",
    "POLICIES",
    "REGISTRY",
    "ROWS",
    "Readme",
    "Row",
    "Step",
]
__all__ += ["adam", "by_family", "every_method", "every_optimizer", "in_turns"]

NAMES = ("muon", "racs", "asgo", "dasgo", "shampoo", "foam", "dr_shampoo", "soap", "eigen_adam")
NAMES += ("kl_shampoo", "galore", "fira", "alice", "apollo", "sumo", "swan", "osgdm")


def _more() -> Iterator[Row]:
    folder = os.environ.get("CURVAX_ROWS")
    for path in sorted(Path(folder).glob("*.py")) if folder else ():
        spec = importlib.util.spec_from_file_location(f"{__name__}.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.ROW


METHODS: tuple[Row, ...] = (
    *(importlib.import_module(f"{__name__}.{name}").ROW for name in NAMES),
    *_more(),
)
"""What the pages and most benchmarks have: the methods of the library."""

REGISTRY = METHODS + tuple(
    row
    for row in LEADERS
    if ALL_CELLS or row.name in os.environ.get("CURVAX_LEADERS", "").split(",")
)
"""What the suites run: the methods, and with CURVAX_ALL_CELLS what is made of the same parts."""

NAMED = {row.name: row for row in REGISTRY}

# A row's tests share compiled programs, so they run in one worker.
ROWS = [pytest.param(row, id=row.name, marks=pytest.mark.xdist_group(row.name)) for row in REGISTRY]
every_optimizer = pytest.mark.parametrize("row", ROWS)
every_method = pytest.mark.parametrize("row", ROWS[: len(METHODS)])


def in_turns(start: int, of: int = 3) -> pytest.MarkDecorator:
    """Parametrizes a test by every `of`-th optimizer, for behavior that all of them share.

    Tests with different `start` cover different optimizers, so each optimizer runs a share of them.
    With CURVAX_ALL_CELLS each optimizer runs all.
    """
    return pytest.mark.parametrize("row", ROWS if ALL_CELLS else ROWS[start::of])


def by_family(rows: Sequence[Row] = METHODS) -> dict[str, list[Row]]:
    """The rows of each family."""
    families = dict.fromkeys(row.family for row in rows)
    return {family: [row for row in rows if row.family == family] for family in families}
