"""Products in full precision, for what feeds a root or a basis.

*On TPUs* (`_platforms.py`) large ones are summed over tiles in a loop. In `Precision.HIGHEST` XLA
takes 11 s of CPU time to compile a product of order 2048 for a v5e, each time that a program has
one; in tiles it takes 1.3 s at order 4096. Where devices share a matrix (`_spread.py`) there are no
tiles.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ._numerics import HIGHEST, zeros_beside
from ._platforms import by_platform, in_turn
from ._spread import is_shared, spread

TILE = 512
"""Rows, columns and summands of a tile."""


def product(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)` of one dtype; `transpose`: of `a (..., k, m)`.

    For a TPU this takes no memory for the transpose, as a product with `a.mT` would.
    """
    form = functools.partial(_plain, transpose=transpose)
    if is_shared():
        return spread(form(a, b))
    if max(*a.shape[-2:], b.shape[-1]) <= TILE:
        return in_turn(form, a, b) if a.shape[:-2] == b.shape[:-2] else form(a, b)
    return by_platform(functools.partial(in_tiles, transpose=transpose), form, a, b)


def _plain(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    return jnp.matmul(a.mT if transpose else a, b, precision=HIGHEST)


@functools.partial(jax.jit, static_argnames="transpose")
def in_tiles(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """`a b`, or `aᵀ b`, tile by tile."""
    if max(a.ndim, b.ndim) > 2:
        one = functools.partial(in_tiles, transpose=transpose)
        signature = "(k,m),(k,n)->(m,n)" if transpose else "(m,k),(k,n)->(m,n)"
        return jnp.vectorize(one, signature=signature)(a, b)
    k, n = b.shape
    m = a.shape[1 if transpose else 0]
    high, deep, wide = (min(TILE, size) for size in (m, k, n))
    across, rounds = -(-n // wide), -(-k // deep)

    def tile(i: jax.Array, found: jax.Array) -> jax.Array:
        # The last tile of a row or column begins where it fits (`dynamic_slice` sees to that), and
        # has some entries a second time. Padding would copy both matrices.
        row, column = i // across * high, i % across * wide

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            if transpose:
                left = jax.lax.dynamic_slice(a, (j * deep, row), (deep, high)).mT
            else:
                left = jax.lax.dynamic_slice(a, (row, j * deep), (high, deep))
            right = jax.lax.dynamic_slice(b, (j * deep, column), (deep, wide))
            if k % deep:  # summands count once
                new = jnp.minimum(j * deep, k - deep) + jnp.arange(deep) >= j * deep
                left = jnp.where(new[None, :], left, 0)
                right = jnp.where(new[:, None], right, 0)
            return total + _plain(left, right)

        total = jax.lax.fori_loop(0, rounds, add, zeros_beside(a, (high, wide)))
        return jax.lax.dynamic_update_slice(found, total, (row, column))

    return jax.lax.fori_loop(0, -(-m // high) * across, tile, zeros_beside(a, (m, n)))
