"""Every method in one row, which all suites, the benchmarks and the pages read.

A method's row is `ROW` of the file of its name. `CURVAX_ROWS` names a folder with more of them,
which nothing else has to know.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ALL_CELLS

from ._bounds import Step, adam
from ._row import ADAPTIVE, POLICIES, Readme, Row

__all__ = ["ADAPTIVE", "NAMED", "POLICIES", "REGISTRY", "ROWS", "Readme", "Row", "Step"]
__all__ += ["adam", "by_family", "every_optimizer", "in_turns"]

NAMES = ("muon", "racs", "asgo", "dasgo", "shampoo", "foam", "dr_shampoo", "soap", "eigen_adam")
NAMES += ("galore", "fira", "alice", "apollo", "sumo", "swan", "osgdm")


def _more() -> Iterator[Row]:
    folder = os.environ.get("CURVAX_ROWS")
    for path in sorted(Path(folder).glob("*.py")) if folder else ():
        spec = importlib.util.spec_from_file_location(f"{__name__}.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.ROW


REGISTRY: tuple[Row, ...] = (
    *(importlib.import_module(f"{__name__}.{name}").ROW for name in NAMES),
    *_more(),
)
NAMED = {row.name: row for row in REGISTRY}

# A row's tests share compiled programs, so they run in one worker.
ROWS = [pytest.param(row, id=row.name, marks=pytest.mark.xdist_group(row.name)) for row in REGISTRY]
every_optimizer = pytest.mark.parametrize("row", ROWS)


def in_turns(start: int, of: int = 3) -> pytest.MarkDecorator:
    """Every third or `of`-th optimizer: for what happens to all of them alike, as in wrappers.

    The tests begin with another one in turns, so that each optimizer goes through its share of
    them. With CURVAX_ALL_CELLS each goes through all.
    """
    return pytest.mark.parametrize("row", ROWS if ALL_CELLS else ROWS[start::of])


def by_family() -> dict[str, list[Row]]:
    """The rows of each family."""
    families = dict.fromkeys(row.family for row in REGISTRY)
    return {family: [row for row in REGISTRY if row.family == family] for family in families}
