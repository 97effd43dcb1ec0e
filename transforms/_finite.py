"""Keeping what is not finite out of every state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def is_finite(x: jax.Array) -> jax.Array:
    """Whether each matrix `(..., m, n)` is finite, `(..., 1, 1)`.

    0 · x is 0 or NaN: a sum that XLA computes in one pass, without an array of flags.
    """
    return jnp.sum(0 * x, axis=(-2, -1), keepdims=True) == 0


def finite_or_zero(x: jax.Array) -> jax.Array:
    """Matrices `(..., m, n)`, each zero if it is not finite."""
    return jnp.where(is_finite(x), x, jnp.zeros_like(x))


def guarded(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every leaf of the gradient that would poison second moments.

    Those are leaves whose sum of squares is not finite (in float32 at least): one that is NaN or
    infinite, or large enough for its square to be.
    """
    inner = optax.with_extra_args_support(inner)

    def sound(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.where(jnp.isfinite(jnp.sum(jnp.square(wide))), x, jnp.zeros_like(x))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        return inner.update(jax.tree.map(sound, updates), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
