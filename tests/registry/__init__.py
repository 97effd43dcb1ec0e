"""The registry: one row per method, which all suites and the benchmarks read.

The row of a method is `ROW` in the file with its name. `leaders` has rows of recipes, which the
suites run with CURVAX_ALL_CELLS. `tests/cases.py` has the parameters of tests.
"""

from __future__ import annotations

import importlib

from ..helpers import ALL_CELLS
from ._bounds import Step, adam
from ._row import ADAPTIVE, POLICIES, Row
from .leaders import LEADERS

__all__ = ["ADAPTIVE", "LEADERS", "METHODS", "NAMED", "POLICIES", "REGISTRY"]
__all__ += ["Row", "Step", "adam"]

NAMES = ("muon", "racs", "asgo", "dasgo", "shampoo", "foam", "dr_shampoo", "soap", "eigen_adam")
NAMES += ("kl_shampoo", "galore", "fira", "alice", "apollo", "sumo", "swan", "osgdm")

METHODS: tuple[Row, ...] = tuple(
    importlib.import_module(f"{__name__}.{name}").ROW for name in NAMES
)
"""The methods of the library."""

REGISTRY = METHODS + (LEADERS if ALL_CELLS else ())
"""What the suites run: the methods, and with CURVAX_ALL_CELLS what is made of the same parts."""

NAMED = {row.name: row for row in REGISTRY}
