"""The length of grafted directions, of any size."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg._numerics import rescaled

SIZES = (1e-30, 3e-23, 1e-10, 1.0, 1e10, 3e25, 1e30)


@pytest.mark.parametrize(
    ("size", "target"), [*itertools.product(SIZES, [1e-6, 1.0, 1e6]), (1e-23, 1e-23)]
)
def test_huge_and_tiny_directions_get_the_length(size: float, target: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    own, like = np.float32(x * size), np.float32(x[::-1] * target)
    found = np.asarray(jax.jit(rescaled)(own, like), np.float64)
    lengths = np.linalg.norm(like.astype(np.float64), axis=(1, 2), keepdims=True)
    directions = own / np.linalg.norm(own.astype(np.float64), axis=(1, 2), keepdims=True)
    assert np.abs(found / lengths - directions).max() < 1e-6


def test_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    one = jnp.ones((2, 2))
    assert not rescaled(jnp.zeros((2, 2)), one).any()
    assert not rescaled(one, jnp.zeros((2, 2))).any()
    assert not jnp.isfinite(rescaled(one.at[0, 0].set(jnp.nan), one)).all()
