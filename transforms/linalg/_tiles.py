"""Products in full precision, for what feeds a root or a basis.

*On TPUs* (`_platforms.py`) large ones are summed over tiles in a loop. In `Precision.HIGHEST` XLA
takes 11 s of CPU time to compile a product of order 2048 for a v5e, each time that a program has
one; in tiles it takes 1.3 s at order 4096. Where devices share a matrix (`_spread.py`) there are no
tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._numerics import HIGHEST, zeros_beside
from ._platforms import by_platform
from ._spread import is_shared, spread

TILE = 512
"""Rows, columns and summands of a tile."""


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)` of one dtype."""
    if is_shared():
        return spread(_plain(a, b))
    if max(*a.shape[-2:], b.shape[-1]) <= TILE:
        return _plain(a, b)
    return by_platform(in_tiles, _plain, a, b)


def _plain(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=HIGHEST)


@jax.jit
def in_tiles(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a b`, tile by tile."""
    if max(a.ndim, b.ndim) > 2:
        return jnp.vectorize(in_tiles, signature="(m,k),(k,n)->(m,n)")(a, b)
    (m, k), n = a.shape, b.shape[1]
    high, deep, wide = (min(TILE, size) for size in (m, k, n))
    across, rounds = -(-n // wide), -(-k // deep)

    def tile(i: jax.Array, found: jax.Array) -> jax.Array:
        # The last tile of a row or column begins where it fits (`dynamic_slice` sees to that), and
        # has some entries a second time. Padding would copy both matrices.
        row, column = i // across * high, i % across * wide

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            left = jax.lax.dynamic_slice(a, (row, j * deep), (high, deep))
            right = jax.lax.dynamic_slice(b, (j * deep, column), (deep, wide))
            if k % deep:  # summands count once
                new = jnp.minimum(j * deep, k - deep) + jnp.arange(deep) >= j * deep
                left, right = jnp.where(new, left, 0), jnp.where(new[:, None], right, 0)
            return total + _plain(left, right)

        total = jax.lax.fori_loop(0, rounds, add, zeros_beside(a, (high, wide)))
        return jax.lax.dynamic_update_slice(found, total, (row, column))

    return jax.lax.fori_loop(0, -(-m // high) * across, tile, zeros_beside(a, (m, n)))
