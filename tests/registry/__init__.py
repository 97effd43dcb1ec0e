"""The registry: one row per method, which all suites and the benchmarks read.

`_methods.py` has the rows of the methods; `_leaders.py` has rows of recipes, which the suites run
with CURVAX_ALL_CELLS. `tests/cases.py` has the parameters of tests.
"""

from ..cells import ALL_CELLS
from ._bounds import Step, adam
from ._leaders import LEADERS
from ._methods import METHODS
from ._row import ADAPTIVE, POLICIES, Family, Row

__all__ = ["ADAPTIVE", "LEADERS", "METHODS", "NAMED", "POLICIES", "REGISTRY"]
__all__ += ["Family", "Row", "Step", "adam"]

REGISTRY = METHODS + (LEADERS if ALL_CELLS else ())
"""What the suites run: the methods, and with CURVAX_ALL_CELLS what is made of the same parts."""

NAMED = {row.name: row for row in REGISTRY}
