"""Products of stacks of matrices, those with a transposed matrix written as contractions.

XLA folds `.mT` into a product of two matrices, but not into a product of two batches of one matrix:
on a CPU it first writes out the transpose, which takes a quarter of the time of `x @ x.mT`. In
programs for TPUs stacks go matrix by matrix (`_platforms.in_turn`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .._side import Side
from ._platforms import in_turn


def times(a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)`."""
    return in_turn(functools.partial(jnp.matmul, precision=precision), a, b)


def times_transposed(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """`a bᵀ` for `a (..., m, k)` and `b (..., n, k)` of one dtype."""
    return _summed(a, b, -1, precision)


def transposed_times(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """`aᵀ b` for `a (..., k, m)` and `b (..., k, n)` of one dtype."""
    return _summed(a, b, -2, precision)


def gram_of(
    x: jax.Array,
    side: Side,
    precision: jax.lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x xᵀ`, or `xᵀ x` on the right side, in the dtype of `x` or the given one."""
    return _summed(x, x, side.other.axis, precision, dtype)


def _summed(
    a: jax.Array,
    b: jax.Array,
    axis: int,
    precision: jax.lax.PrecisionLike,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    def contracted(a: jax.Array, b: jax.Array) -> jax.Array:
        batch = tuple(range(a.ndim - 2))
        summed = (a.ndim + axis,)
        dimensions = ((summed, summed), (batch, batch))
        return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=dtype)

    return in_turn(contracted, a, b)
