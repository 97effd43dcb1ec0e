"""The fault model: faults in gradients, and the optimizers that must tolerate them.

A *unit* is skipped or kept independently: a matrix (one entry of a batch), or a leaf that AdamW
updates. A fault writes one value into part of the gradients, at one step or at ten, and strikes the
units that hold this part. The requirement is the same for every fault: at these steps a struck unit
behaves bitwise as with a zero gradient, and does not move; `skipped` counts the step, and nothing
else changes.

Faults are data: masks over trajectories, so that one compiled program serves all of them.
`test_faults.py` and `test_damaged_states.py` share this file.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvax import policies
from tests.registry import ADAPTIVE, NAMED, REGISTRY, Row

Masks = dict[str, np.ndarray]

VALUES = {"NaN": np.nan, "+Inf": np.inf, "−Inf": -np.inf, "1e30": 1e30}  # its square is infinite
EXTENTS = ("element", "row", "leaf", "all leaves")
MOMENTS = ("step 1", "between refreshes", "at a refresh")
DURATIONS = (1, 10)


class Fault(NamedTuple):
    """A value, the entries that it replaces, its first step, and its duration in steps."""

    value: str
    extent: str
    moment: str
    steps: int

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.value} in {self.extent}, {self.moment}, {steps}"

    @property
    def place(self) -> tuple[str, str, int]:
        """All fields but the value: faults of one place strike the same units at the same steps."""
        return self.extent, self.moment, self.steps


PLACES = tuple(itertools.product(EXTENTS, MOMENTS, DURATIONS))
FAULTS = tuple(Fault(value, *place) for value in VALUES for place in PLACES)


def struck(
    fault: Fault, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int], steps: int
) -> Masks:
    """The entries of a trajectory of gradients that a fault replaces, bool `(steps, …)` per leaf.

    The struck leaf, matrix, row and column rotate with the place, so that every extent, moment and
    duration strikes every leaf. A vector has one row: all of its elements.
    """
    turn = PLACES.index(fault.place) + EXTENTS.index(fault.extent)
    chosen = list(shapes)[turn % len(shapes)]
    when = slice(starts[fault.moment] - 1, starts[fault.moment] - 1 + fault.steps)
    assert when.start >= 0 and when.stop <= steps, f"{fault} ends after step {steps}"
    masks = {}
    for name, shape in shapes.items():
        mask = np.zeros(shape, bool)
        if fault.extent == "all leaves":
            mask[...] = True
        elif name == chosen:
            batch, rows = shape[:-2], shape[-2:-1]
            place = tuple(turn % d for d in (*batch, *rows, *shape[-1:]))
            depth = {"leaf": 0, "row": len(batch) + len(rows), "element": len(place)}
            mask[place[: depth[fault.extent]]] = True
        masks[name] = np.zeros((steps, *shape), bool)
        masks[name][when] = mask
    return masks


def hits(mask: np.ndarray) -> np.ndarray:
    """The struck units of a leaf, bool `(steps, units)`, for a mask `(steps, …)`."""
    unit = mask.shape[-2:] if mask.ndim > 2 else mask.shape[1:]
    return np.any(mask.reshape(len(mask), -1, math.prod(unit)), axis=-1, keepdims=False)


def widened(masks: Masks) -> Masks:
    """Widens the masks to complete units."""

    def whole(mask: np.ndarray) -> np.ndarray:
        batch = mask.shape[1:-2]
        hit = hits(mask).reshape(len(mask), *batch, *[1] * (mask.ndim - 1 - len(batch)))
        return np.broadcast_to(hit, mask.shape)

    return {name: whole(mask) for name, mask in masks.items()}


def injected(gradients: Any, masks: Any, value: Any) -> Any:
    """Writes `value` into the gradients where the masks are true; also works for a single step."""
    return jax.tree.map(
        lambda g, mask: jnp.where(mask, jnp.asarray(value, g.dtype), g), gradients, masks
    )


# The optimizers.

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
