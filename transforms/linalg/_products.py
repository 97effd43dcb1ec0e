"""Products with the transpose of one matrix, told by what is summed over.

XLA folds `.mT` into a product of two matrices, but not of two batches of one: on a CPU it writes
the transpose out first, for a quarter of the time that `x @ x.mT` then takes. Where the transpose
is thin that is worth it: XLA's faster kernels do not take a first factor that is summed over rows.
"""

from __future__ import annotations

import jax

from .._side import Side


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


def thin_transposed_times(a: jax.Array, b: jax.Array) -> jax.Array:
    """`aᵀ b` for `a (..., k, r)` and `b (..., k, n)`, where r is far less than n: a basis."""
    return a.mT @ b


def gram_of(
    x: jax.Array,
    side: Side,
    precision: jax.lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x xᵀ`, or on the right `xᵀ x`, in its dtype or the one given."""
    return _summed(x, x, side.other.axis, precision, dtype)


def _summed(
    a: jax.Array,
    b: jax.Array,
    axis: int,
    precision: jax.lax.PrecisionLike,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    summed = (a.ndim + axis,)
    dimensions = ((summed, summed), (batch, batch))
    return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=dtype)
