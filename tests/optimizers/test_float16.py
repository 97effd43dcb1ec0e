"""Optimizers of parameters in float16 compute in float32, and round their updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, trajectory
from tests.registry import REGISTRY, Row

SIZES = (0, 1e-5, 1e-3, 10)  # of which float16 holds neither the squares nor 1e-8


def gradients() -> Any:
    """One step per size."""
    random, shapes = np.random.default_rng(0), {"kernel": (4, 6), "bias": (6,)}
    by_size = {
        name: np.stack([np.float16(size * random.standard_normal(shape)) for size in SIZES])
        for name, shape in shapes.items()
    }
    return {"dense": by_size}


def updates_of(optimizer: Any, dtype: Any) -> Any:
    given = jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients())
    found, _ = jax.jit(trajectory(optimizer))(given, jax.tree.map(lambda g: g[0] + 1, given))
    return found


def assert_rounded(optimizer: Any) -> None:
    found, expected = (updates_of(optimizer, dtype) for dtype in ("float16", "float32"))
    assert all(x.dtype == jnp.float16 for x in jax.tree.leaves(found))
    assert_close(found, expected, 1.0)
    for x in jax.tree.leaves(found):
        assert x[-1].any()


@pytest.mark.parametrize("row", cells(REGISTRY, of=6))
def test_updates_in_float16_are_those_of_float32_rounded(row: Row) -> None:
    assert_rounded(row.make(**row.for_fuzzing()))


COMPOSED = {
    "a base": lambda: curvax.shampoo(0.1, base=optax.adam, refresh=1, statistics_every=1),
    "Lion for others": lambda: curvax.muon(0.1, others=optax.lion(0.1)),
    "RMSProp for others": lambda: curvax.muon(0.1, others=optax.rmsprop(0.1)),
    "only if finite": lambda: optax.apply_if_finite(curvax.muon(0.1), 2),
}


@pytest.mark.parametrize("name", cells(COMPOSED, of=2))
def test_float16_inside_and_around_an_optimizer(name: str) -> None:
    assert_rounded(COMPOSED[name]())


@pytest.mark.parametrize("method", cells(["foam", "dr_shampoo", "shampoo"], of=3))
def test_grafted_directions_in_float16_are_those_of_float32_rounded(method: str) -> None:
    """Before it gets its length, a direction may be longer than float16 holds."""
    settings: dict[str, Any] = {"eps": 1e-9, "graft": "adam"}
    if method == "shampoo":
        settings |= {"refresh": 1, "statistics_every": 1}
    direction = getattr(curvax, f"scale_by_{method}")(**settings)
    given = np.float16(1e-4 * np.random.default_rng(0).standard_normal((6, 4, 6)))
    found, expected = (
        jax.jit(trajectory(direction))(jnp.asarray(given, dtype), jnp.ones((4, 6), dtype))[0]
        for dtype in ("float16", "float32")
    )
    assert found.dtype == jnp.float16
    assert_close(found, expected, 4.0)
