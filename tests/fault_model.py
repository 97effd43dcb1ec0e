"""The fault model: what may go wrong with a gradient, and the optimizers that have to bear it.

A *unit* is what is skipped alone: a matrix (one entry of a batch), or a leaf that goes to AdamW. A
fault puts one value into a part of the gradients at one step or at ten, and strikes the units that
hold that part. What has to happen is the same for all of them: at these steps what was struck takes
part with a zero gradient, bit for bit, and stands still; `skipped` counts it, and nothing else
changes.

Faults are data: masks over whole trajectories, so that one compiled program serves all of them.
`test_faults.py` and `benchmarks/faults.py` share this file.
"""

from __future__ import annotations

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
from curvax.transforms.state._summary import entries_of

Masks = dict[str, np.ndarray]

VALUES = {"NaN": np.nan, "+Inf": np.inf, "−Inf": -np.inf, "1e30": 1e30}  # its square is infinite
EXTENTS = ("element", "row", "leaf", "all leaves")
MOMENTS = ("step 1", "between refreshes", "at a refresh")
DURATIONS = (1, 10)


class Fault(NamedTuple):
    """What is put where, when, and for how many steps."""

    value: str
    extent: str
    moment: str
    steps: int

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.value} in {self.extent}, {self.moment}, {steps}"

    @property
    def place(self) -> tuple[str, str, int]:
        """All but the value: faults of one place strike the same units at the same steps."""
        return self.extent, self.moment, self.steps


PLACES = tuple(itertools.product(EXTENTS, MOMENTS, DURATIONS))
FAULTS = tuple(Fault(value, *place) for value in VALUES for place in PLACES)


def struck(
    fault: Fault, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int], steps: int
) -> Masks:
    """Where a fault puts its value in a trajectory of gradients, bool `(steps, …)` for each leaf.

    Leaves, matrices, rows and columns take turns with the places, so that every extent, every
    moment and every duration strikes every leaf. The one row of a vector is all of it.
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
    """Which units of a leaf are struck, bool `(steps, units)`, for a mask `(steps, …)`."""
    unit = mask.shape[-2:] if mask.ndim > 2 else mask.shape[1:]
    return np.any(mask.reshape(len(mask), -1, math.prod(unit)), axis=-1, keepdims=False)


def widened(masks: Masks) -> Masks:
    """The masks of all of the units that are struck."""

    def whole(mask: np.ndarray) -> np.ndarray:
        batch = mask.shape[1:-2]
        hit = hits(mask).reshape(len(mask), *batch, *[1] * (mask.ndim - 1 - len(batch)))
        return np.broadcast_to(hit, mask.shape)

    return {name: whole(mask) for name, mask in masks.items()}


def stands_still(method: str, name: str) -> bool:
    """Whether nothing moves a leaf that is struck; OSGDM's momentum is behind its matrices."""
    return method != "osgdm" or name.endswith("bias")


def injected(gradients: Any, masks: Any, value: Any) -> Any:
    """The gradients with `value` wherever the masks say so; also of a single step."""
    return jax.tree.map(
        lambda g, mask: jnp.where(mask, jnp.asarray(value, g.dtype), g), gradients, masks
    )


# The optimizers.

ADAM = {"b1": 0.9, "b2": 0.9}
LOW_RANK = {"rank": 3, "eps": 0.1}
SHAMPOO = {"b2": 0.9, "eps": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {"steps": 3},
    "osgdm": {},
    "swan": {},
    "racs": {"matrices": curvax.MatrixRule(output_layer=None)},
    "dasgo": ADAM,
    "asgo": {"eps": 1e-4, **ADAM},
    "shampoo": {
        "statistics_every": 1,
        "base": None,
        "damping_mode": "absolute",
        "root": 2,
        **SHAMPOO,
    },
    "foam": {"threshold": 0.3, "max_damping": 0.02, **SHAMPOO},
    "dr_shampoo": {"threshold": 0.3, **SHAMPOO},
    "soap": {"b3": 0.9, "eps": 0.1, **ADAM},
    "eigen_adam": {"b3": 0.9, "eps": 0.1, "side": "smaller", **ADAM},
    "galore": LOW_RANK,
    "fira": LOW_RANK,
    "alice": {"leading": 2, "b3": 0.9, **LOW_RANK},
    "apollo": LOW_RANK,
    "sumo": {"rank": 3},
}
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
}
OWN_POLICY = ("foam", "dr_shampoo")


class Cell(NamedTuple):
    """A method with a refresh policy and a storage; None where it does without."""

    method: str
    refresh: str | None = None
    storage: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, self))

    def make(self, learning_rate: Any, period: int, **settings: Any) -> Any:
        """The optimizer."""
        own = dict(SETTINGS[self.method])
        if self.method in OWN_POLICY:
            own["check_every"] = period
        if self.refresh is not None:
            own["refresh"] = REFRESH[self.refresh](period)
        if self.storage is not None:
            own["storage"] = STORAGE[self.storage]
        return getattr(curvax, self.method)(learning_rate, **own, **settings)

    def starts(self, period: int) -> dict[str, int]:
        """The step at which a fault of each moment begins.

        Staggered matrices have their own turns: some are between refreshes when others are not.
        """
        adapts = {self.method, self.refresh} & {"foam", "dr_shampoo", "diagonal_residual"}
        return dict(zip(MOMENTS, (1, 3 * period // 2, 2 * period + bool(adapts)), strict=True))


PRODUCT: dict[str, tuple[tuple[str | None, ...], tuple[str | None, ...]]] = {
    "muon osgdm swan racs dasgo": ((None,), (None,)),
    "asgo shampoo": (("every", "stagger", "foam", "diagonal_residual"), tuple(STORAGE)),
    "foam dr_shampoo": ((None,), tuple(STORAGE)),
    "soap eigen_adam": (("every", "stagger", "diagonal_residual"), tuple(STORAGE)),
    "galore fira alice apollo sumo": (("every", "stagger", "below_norm"), (None,)),
}
CELLS = tuple(
    Cell(method, refresh, storage)
    for methods, arguments in PRODUCT.items()
    for method in methods.split()
    for refresh, storage in itertools.product(*arguments)
)


class Counter(NamedTuple):
    """Where the state has the counters of a leaf's units."""

    name: str
    leaf: int  # number of the state's leaf
    units: slice | None
    column: int | None  # of the leaf's last axis

    def read(self, state: Any) -> np.ndarray:
        """The counters, `(units,)`."""
        x = np.asarray(jax.tree.leaves(state)[self.leaf])
        x = x if self.column is None else x[..., self.column]
        return x if self.units is None else x[self.units]


def counters(optimizer: Any, params: Any) -> list[Counter]:
    """All that an optimizer's state has in fields named `skipped`."""
    return [
        Counter(name, i, units, column if entry.names else None)
        for i, entry in enumerate(entries_of(optimizer, params))
        for column, place in enumerate(entry.places)
        if "skipped" in place.split("/")
        for name, units in entry.owners
    ]
