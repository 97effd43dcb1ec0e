"""Trajectories of Shampoo and its kin for identities between them.

Trees of gradients, updates and states hold all steps, which come first. What differs between runs
of a method is data of one program where it can be: decay rates, damping, roots, periods,
thresholds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import curvax
from curvax.transforms.kronecker._factor import Factor
from tests.helpers import ALL_CELLS, assert_close, at, gradients_like, scanned, stacked

STEPS = 20
EPS = 2.0**-4  # beside factors of size up to 10
KAPPA = 10 / EPS
SQUARE = {"square": (5, 5)}
SHAPES = {"wide": (2, 4, 7)} | ({"tall": (2, 7, 4)} | SQUARE if ALL_CELLS else {})
AXES = {name: curvax.MatrixAxes(-2, -1) for name in SHAPES}
FOREVER = 10**6
ENDLESS, NEXT_TO_0 = float("inf"), 1e-12  # thresholds


def gradients_of(shapes: Any) -> Any:
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return stacked(gradients_like(params, STEPS, dtype="float32"))


def wide(trees: Any) -> Any:
    """What identities between policies are asserted on."""
    return {name: x for name, x in trees.items() if ALL_CELLS or name == "wide"}


GRADIENTS = gradients_of(SHAPES)
WIDE = wide(GRADIENTS)
Trajectory = Callable[..., tuple[Any, Any]]  # from gradients to updates and states


def family(make: Any, default: Any = GRADIENTS) -> Trajectory:
    """Updates and states of `make(value)` with parameters of ones, from gradients and the value."""
    program = scanned(make)

    def run(value: Any, gradients: Any = default) -> tuple[Any, Any]:
        return program(gradients, value, jax.tree.map(lambda g: np.ones_like(g[0]), gradients))

    return run


def updates_of(transformation: Any, gradients: Any = GRADIENTS) -> Any:
    return family(transformation)(None, gradients)[0]


def refreshes_of(states: Any, field: str = "refreshes") -> np.ndarray:
    """How often each matrix's factors were refreshed at each step, or what else was counted."""
    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    factors = [x for x in jax.tree.leaves(states, is_leaf=is_factor) if is_factor(x)]
    return np.concatenate([getattr(x, field).reshape(STEPS, -1) for x in factors], axis=1)


@functools.cache
def shampoos(damping: str, graft: str | None, side: str, sums: bool) -> Trajectory:
    def make(value: Any) -> optax.GradientTransformation:
        return curvax.scale_by_shampoo(
            b1=value.get("b1"),
            b2=None if sums else value["b2"],
            eps=value["eps"],
            root=value["root"] if side == "both" else 2,  # which ASGO has bit for bit
            refresh=curvax.every(value["period"], offset=1),
            initial=value["initial"],
            statistics_every=1,
            damping_mode=damping,
            graft=graft,
            side=side,
        )

    return family(make)


def run_shampoo(
    gradients: Any = GRADIENTS,
    damping: str = "absolute",
    graft: str | None = None,
    side: str = "both",
    sums: bool = False,
    **value: float,
) -> tuple[Any, Any]:
    defaults = {"b2": 0.9, "eps": EPS, "root": 2, "initial": 0.0, "period": 2}
    return shampoos(damping, graft, side, sums)({**defaults, **value}, gradients)


def assert_same(one: Any, other: Any, condition: float = KAPPA, factor: float = 16.0) -> None:
    for t in range(len(jax.tree.leaves(one)[0])):
        assert_close(at(one, t), at(other, t), factor, condition=condition)


def assert_different(one: Any, other: Any) -> None:
    """Every matrix, by much more than rounding."""
    last = [jax.tree.leaves(at(x, -1)) for x in (one, other)]
    for x, y in zip(*last, strict=True):
        assert np.max(np.abs(x - y)) > 0.03 * np.max(np.abs(y))


def assert_equal(one: Any, other: Any) -> None:
    assert_same(one, other, factor=0.0)


def all_transposed(trees: Any) -> Any:
    """Every matrix transposed, under the name of its new shape."""
    names = {"wide": "tall", "tall": "wide", "square": "square"}
    return {names[old]: x.mT for old, x in trees.items()}
