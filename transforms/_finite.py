"""Which gradients may be taken in: those whose second moments are finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def is_usable(x: jax.Array, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Whether sums of squares over `axis` are finite: for matrices `(..., m, n)`, `(..., 1, 1)`.

    They are not with an entry that is NaN or infinite, or so large that its square is.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.isfinite(jnp.sum(wide * wide, axis=axis, keepdims=axis is not None))


def where_usable(usable: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x`, or zeros if it is not `usable`, which has its rank; `None` means that it is."""
    return x if usable is None else jnp.where(usable, x, jnp.zeros_like(x))


def usable_or_zero(x: jax.Array) -> jax.Array:
    """Matrices `(..., m, n)`, each zero if it is not usable."""
    return where_usable(is_usable(x), x)
