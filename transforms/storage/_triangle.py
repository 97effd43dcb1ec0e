r"""Triangles in squares: one strictly lower triangle in half a square, or two in one square.

A strictly lower triangle of order $d$ folds into $\lceil d/2 \rceil$ rows of length $d$. Each row
$i \ge \lfloor d/2 \rfloor$ keeps its elements left of the diagonal; row $d - 1 - i$, reversed,
fills the rest. Two strictly lower triangles share a square, the second one transposed. A lower
triangle with its diagonal is a strictly lower triangle of order $d + 1$.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def strictly_lower(order: int) -> jax.Array:
    """The mask of the elements left of the diagonal, `(order, order)`."""
    return jnp.tri(order, k=-1, dtype=bool)


def fold(x: jax.Array) -> jax.Array:
    """Folds the strictly lower triangle of `x (..., d, d)` into `(..., ⌈d/2⌉, d)`."""
    order = x.shape[-1]
    turned = x[..., ::-1, ::-1]
    return jnp.where(strictly_lower(order), x, turned)[..., order // 2 :, :]


def unfold(folded: jax.Array) -> jax.Array:
    """The inverse of `fold`: `(..., d, d)`, correct below the diagonal, arbitrary elsewhere."""
    top = folded[..., ::-1, ::-1][..., : folded.shape[-1] // 2, :]
    return jnp.concatenate([top, folded], axis=-2)


def join(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Two strictly lower triangles `(..., d, d)` in one square, `upper` transposed.

    To undo it, read below the diagonal of the square and of its transpose.
    """
    return jnp.where(strictly_lower(lower.shape[-1]), lower, upper.mT)


def with_room(x: jax.Array) -> jax.Array:
    """A lower triangle `(..., d, d)` with diagonal, as a strictly lower one of order `d + 1`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 1)])


def without_room(x: jax.Array) -> jax.Array:
    """The inverse of `with_room`: correct on and below the diagonal, arbitrary above."""
    return x[..., 1:, :-1]
