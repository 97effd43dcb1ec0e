r"""Squares that hold triangles: a strictly lower one folded to half a square, or two in one.

A strictly lower triangle of order $d$ folds into $\lceil d/2 \rceil$ rows of $d$: row
$\lfloor d/2 \rfloor + i$ keeps its place, left of the diagonal, and the row as far from the top as
it is from the bottom lies, turned around, to the right of it. Two strictly lower triangles share a
square, the second transposed. Lower triangles with their diagonals are strictly lower ones of an
order more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def strictly_lower(order: int) -> jax.Array:
    """Where the column is left of the diagonal, `(order, order)`."""
    return jnp.tri(order, k=-1, dtype=bool)


def fold(x: jax.Array) -> jax.Array:
    """The strictly lower triangle of `x (..., d, d)`, in `(..., ⌈d/2⌉, d)`."""
    order = x.shape[-1]
    turned = x[..., ::-1, ::-1]
    return jnp.where(strictly_lower(order), x, turned)[..., order // 2 :, :]


def unfold(folded: jax.Array) -> jax.Array:
    """Undoes `fold`: `(..., d, d)`, right below the diagonal and arbitrary elsewhere."""
    top = folded[..., ::-1, ::-1][..., : folded.shape[-1] // 2, :]
    return jnp.concatenate([top, folded], axis=-2)


def join(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Two strictly lower triangles `(..., d, d)` in one square, which `upper` enters transposed.

    Undone by looking below the diagonal of the square and of its transpose.
    """
    return jnp.where(strictly_lower(lower.shape[-1]), lower, upper.mT)


def with_room(x: jax.Array) -> jax.Array:
    """A lower triangle `(..., d, d)` with its diagonal as a strictly lower one of order `d + 1`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 1)])


def without_room(x: jax.Array) -> jax.Array:
    """Undoes `with_room`: right on and below the diagonal, arbitrary above."""
    return x[..., 1:, :-1]
