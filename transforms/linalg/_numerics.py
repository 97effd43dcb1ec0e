"""The basis of all linear algebra here: full precision, exact scaling, what is rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
"""The precision of all products that feed a root or a basis."""


def inexact(x: jax.Array) -> jax.Array:
    """`x`, integers as float32, as `jax.numpy.linalg` takes them."""
    return x if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x, jnp.float32)


def magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude in `x`: not finite if an entry is not, and 0 if all are.

    One reduction, which XLA for CPUs takes from a library; `isfinite(x).all()` and `any(x != 0)`
    would be kernels to compile for each shape.
    """
    return jnp.max(jnp.abs(x))


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
