"""Scaling by powers of two, which is exact, so that squares and norms stay in range."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def power_of_two(largest: jax.Array) -> jax.Array:
    """The exponent `e` (int32) for which `largest · 2^(-e)` is in [1/2, 1); 0 for 0.

    Kept within ±126, so that `2^(-e)` is a float32. For what is not finite it is arbitrary.
    """
    return jnp.clip(jnp.frexp(largest.astype(jnp.float32))[1], -126, 126)
