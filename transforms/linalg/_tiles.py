"""Products in full precision, for what feeds a root or a basis.

*On TPUs* (`_platforms.py`) large ones are summed over tiles in a loop. In `Precision.HIGHEST` XLA
takes 11 s of CPU time to compile a product of order 2048 for a v5e, each time that a program has
one; in tiles it takes 1.3 s at order 4096. Of triangles, tiles of zeros are left out. Where devices
share a matrix (`_spread.py`) there are no tiles.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ._numerics import HIGHEST, zeros_beside
from ._platforms import by_platform, in_turn
from ._spread import is_shared, spread

TILE = 512
"""The most rows, columns and summands of a tile."""
LANES = 128
"""A TPU's arrays are laid out in multiples of so many columns."""


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


def square_of_lower(c: jax.Array) -> jax.Array:
    """`c cᵀ` for lower triangles `c (..., d, d)` with diagonal: `d³` FLOPs, on TPUs `d³ / 3`."""
    if is_shared() or c.shape[-1] <= TILE:
        return _by_halves(c)
    return by_platform(_mirrored, _by_halves, c)


def _by_halves(c: jax.Array) -> jax.Array:
    half = c.shape[-1] // 2
    top = product(c[..., :half, :half], c[..., :, :half].mT)
    bottom = product(c[..., half:, :], c[..., half:, :].mT)
    below = jnp.concatenate([top[..., half:].mT, bottom], axis=-1)
    return jnp.concatenate([top, below], axis=-2)


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
    high, deep, wide = map(_tile, (m, k, n))
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


@jax.jit
def _mirrored(c: jax.Array) -> jax.Array:
    """The tiles of `c cᵀ` on and below the diagonal, and these transposed above it."""
    if c.ndim > 2:
        return jnp.vectorize(_mirrored, signature="(n,n)->(n,n)")(c)
    order = c.shape[-1]
    size = _tile(order)
    lower = np.tril_indices(-(-order // size))
    rows, columns = (jnp.asarray(index * size, jnp.int32) for index in lower)

    def tile(i: jax.Array, found: jax.Array) -> jax.Array:
        row, column = rows[i], columns[i]

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            left, right = (
                jax.lax.dynamic_slice(c, (at, j * size), (size, size)) for at in (row, column)
            )
            if order % size:  # summands count once
                new = jnp.minimum(j * size, order - size) + jnp.arange(size) >= j * size
                left = jnp.where(new[None, :], left, 0)
            return total + _plain(left, right.mT)

        with jax.named_scope(f"rounds_{np.mean(lower[1] + 1):.2f}"):  # for profiles, as a mean
            start = zeros_beside(c, (size, size))
            total = jax.lax.fori_loop(0, column // size + 1, add, start)
        found = jax.lax.dynamic_update_slice(found, total, (row, column))
        return jax.lax.dynamic_update_slice(found, total.mT, (column, row))

    return jax.lax.fori_loop(0, len(rows), tile, zeros_beside(c, c.shape))


def _tile(size: int) -> int:
    """As wide as others of the same side, as nearly as a TPU's layout allows."""
    even = -(-size // -(-size // TILE))
    return min(size, TILE, -(-even // LANES) * LANES)
