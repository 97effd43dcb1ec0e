"""The optimizers that must tolerate faults: methods, policies and storages.

`test_faults.py` and `test_damaged_states.py` share this file.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import curvax
from curvax import policies
from tests.registry import ADAPTIVE, NAMED, REGISTRY, Row

MOMENTS = ("step 1", "between refreshes", "at a refresh")
"""At which a fault begins."""

REFRESH: dict[str, Callable[[int], Any]] = {
    "every": curvax.every,
    "stagger": functools.partial(curvax.every, stagger=True),
    "foam": functools.partial(policies.foam, threshold=0.3, max_damping=0.02),
    "diagonal_residual": functools.partial(policies.diagonal_residual, threshold=0.3),
    "below_norm": lambda k: policies.below_norm(2.0, check_every=k),
}
TILES = {"block": 4, "min_elements": 1}
STORAGE = {
    "dense": curvax.dense(),
    "quantized": curvax.quantized(**TILES),
    "cholesky": curvax.cholesky(**TILES),
    "feedback": curvax.cholesky(error_feedback=0.95, **TILES),
    "packed": curvax.packed(**TILES),
}


class Cell(NamedTuple):
    """A method with a refresh policy and a storage; None if it has none."""

    method: str
    refresh: str | None = None
    storage: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, self))

    @property
    def row(self) -> Row:
        """The row of the method."""
        return NAMED[self.method]

    def make(self, learning_rate: Any, period: int, **settings: Any) -> Any:
        """Builds the optimizer."""
        own = self.row.for_faults()
        if self.row.own_policy:
            own["check_every"] = period
        if self.refresh is not None:
            own["refresh"] = REFRESH[self.refresh](period)
        if self.storage is not None:
            own["storage"] = STORAGE[self.storage]
        return self.row.optimizer(learning_rate, **own, **settings)

    @property
    def adapts(self) -> bool:
        """Whether it examines the state or the gradient before it refreshes."""
        return self.row.own_policy or self.refresh in ADAPTIVE

    def starts(self, period: int) -> dict[str, int]:
        """The first step of a fault, by moment.

        With staggering, matrices refresh at different steps: some are between refreshes while
        others refresh.
        """
        later = self.adapts and self.refresh != "below_norm"
        return dict(zip(MOMENTS, (1, 3 * period // 2, 2 * period + later), strict=True))

    def stands_still(self, name: str) -> bool:
        """Whether a struck leaf stays constant: no momentum follows `on_matrices`."""
        return not self.row.after_the_matrices or name.endswith("bias")


def cells_of(row: Row) -> list[Cell]:
    """The cells of a method: all policies and storages that it takes."""
    storages = STORAGE if row.factors else (None,)
    return [Cell(row.name, *x) for x in itertools.product(row.policies or (None,), storages)]


CELLS = tuple(cell for row in REGISTRY for cell in cells_of(row))
