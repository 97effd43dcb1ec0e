"""Products of stacks of matrices, those with a transposed matrix written as contractions.

XLA folds `.mT` into a product of two matrices, but not into a product of two batches of one matrix:
on a CPU it first writes out the transpose, which takes a quarter of the time of `x @ x.mT`. For a
thin transpose this is worth it: XLA's faster kernels do not support a first factor that is summed
over its rows.

In programs for TPUs stacks go matrix by matrix (`_platforms.in_turn`), unless `at_once`. In a loop
what comes before and after a product is a pass of its own. Where a step has two products beside a
few passes, as those of `subspace`, such a program is as short, and moves up to half the bytes.
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
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    *,
    at_once: bool = False,
) -> jax.Array:
    """`a bᵀ` for `a (..., m, k)` and `b (..., n, k)` of one dtype."""
    return _summed(a, b, -1, precision, at_once=at_once)


def transposed_times(
    a: jax.Array, b: jax.Array, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """`aᵀ b` for `a (..., k, m)` and `b (..., k, n)` of one dtype."""
    return _summed(a, b, -2, precision)


def thin_transposed_times(a: jax.Array, b: jax.Array) -> jax.Array:
    """`aᵀ b` for `a (..., k, r)` and `b (..., k, n)`, where `r` is far less than `n`; at once."""
    return a.mT @ b


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
    at_once: bool = False,
) -> jax.Array:
    def contracted(a: jax.Array, b: jax.Array) -> jax.Array:
        batch = tuple(range(a.ndim - 2))
        summed = (a.ndim + axis,)
        dimensions = ((summed, summed), (batch, batch))
        return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=dtype)

    return contracted(a, b) if at_once else in_turn(contracted, a, b)
