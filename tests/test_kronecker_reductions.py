"""What the Kronecker-factored methods are to each other, named after their docstrings' "Relations".

Each identity is asserted over a trajectory of 20 steps, on wide, tall and square matrices. Both
sides of an identity are the same work in floating point, but not in the same order: bounds are
`c · κ · eps` with the condition `κ` of the damped factors.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_close, gradients_like, run

import curvax

STEPS = 20
EPS = 2.0**-4  # beside factors of size up to 10
KAPPA = 10 / EPS
SHAPES = {"wide": (4, 7), "tall": (2, 6, 3), "square": (5, 5)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
GRADIENTS = gradients_like(PARAMS, STEPS)
FOREVER = 10**6


def _run(transformation, gradients=GRADIENTS) -> list[Any]:
    return run(transformation, gradients, PARAMS)[0]


def _shampoo(refresh, **settings):
    defaults = {"b2": 0.9, "eps": EPS, "root": 2, "damping": "absolute", "initial": 0.0}
    defaults |= {"statistics_every": 1, "graft": None}
    return curvax.scale_by_shampoo(refresh=refresh, **{**defaults, **settings})


def _assert_same(one, other, condition: float = KAPPA) -> None:
    for x, y in zip(one, other, strict=True):
        assert_close(x, y, 64, condition=condition)


def _assert_different(one, other) -> None:
    last = [jax.tree.leaves(x[-1]) for x in (one, other)]
    assert all(float(jnp.max(jnp.abs(x - y))) > 0.05 for x, y in zip(*last, strict=True))


# Shampoo


BASES = {
    "AdamW": functools.partial(optax.adamw, weight_decay=0.1),
    "RMSprop": optax.rmsprop,
    "SGD with momentum": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("base", BASES)
def test_grafted_and_never_refreshed_shampoo_is_its_base_optimizer(base):
    params = {name: 1.0 + p for name, p in PARAMS.items()}
    optimizer = curvax.shampoo(
        0.1,
        refresh=FOREVER,
        base=BASES[base],
        matrices="all",
        weight_dimension_numbers={"tall": curvax.MatrixAxes(1, 2)},
    )
    ours, _ = run(optimizer, GRADIENTS, params)
    _assert_same(ours, run(BASES[base](0.1), GRADIENTS, params)[0], condition=1.0)
