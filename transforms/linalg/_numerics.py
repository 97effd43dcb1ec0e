"""The basis of all linear algebra here: full precision, exact scaling, rounding noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST
"""The precision of all products that feed a root or a basis."""

EIGENVALUE_NOISE = 8.0
"""An eigenvalue of a symmetric matrix up to this multiple of `eps · d_max` is rounding noise: ten
times that of the zero eigenvalues of float32 averages of rank 1 to n/4, of orders 16 to 512."""


def inexact(x: jax.Array) -> jax.Array:
    """`x`, integers as float32, as `jax.numpy.linalg` takes them."""
    return x if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x, jnp.float32)


def magnitude(
    x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False
) -> jax.Array:
    """The largest magnitude in `x`, or along `axis`: not finite if an entry is not, 0 if all are.

    The largest bit pattern, where those of NaN are above that of infinity: XLA for CPUs leaves NaN
    out of the maximum of 4096 numbers or more (docs/xla.md).
    """
    wide = jnp.abs(x).astype(np.promote_types(x.dtype, np.float32))
    bits = jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    largest = jnp.max(bits, axis=axis, keepdims=keepdims)
    return jax.lax.bitcast_convert_type(largest, wide.dtype).astype(x.dtype)


def power_of_two(largest: jax.Array) -> jax.Array:
    """The exponent `e` (int32) for which `largest · 2^(-e)` is in [1/2, 1); 0 for 0.

    Clipped to ±126, so that `2^(-e)` is a normal float32. Arbitrary if `largest` is not finite.
    """
    return jnp.clip(jnp.frexp(largest.astype(jnp.float32))[1], -126, 126)


def significant(squares: jax.Array) -> jax.Array:
    """Which of `squares (..., n)` have roots above the rounding noise of the largest one's root.

    None if the largest is 0, or not finite.
    """
    noise = (squares.shape[-1] * jnp.finfo(squares.dtype).eps) ** 2
    return squares > noise * jnp.max(squares, axis=-1, keepdims=True)
