"""Elementwise work on matrices that have one number for each tile of `b × b` entries."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ._platforms import by_platform, materialized

Spread = Callable[[jax.Array], jax.Array]


def tile_scales(x: jax.Array, block: int) -> jax.Array:
    """The largest magnitude `(..., ⌈m/b⌉, ⌈n/b⌉)` in each tile of `x (..., m, n)`."""
    *batch, _, n = x.shape
    wide = max(min(block, n), 1)
    columns = jnp.max(_bands(jnp.abs(x), block), axis=-2)
    columns = jnp.pad(columns, [(0, 0)] * (columns.ndim - 1) + [(0, -n % wide)])
    return jnp.max(columns.reshape(*batch, -1, columns.shape[-1] // wide, wide), axis=-1)


def over_tiles(
    f: Callable[[jax.Array, jax.Array, Spread, jax.Array | None], jax.Array],
    x: jax.Array,
    numbers: jax.Array,
    block: int,
    others: jax.Array | None = None,
) -> jax.Array:
    """`f(x, numbers, spread, others)`, which is elementwise in `x (..., m, n)`.

    `spread` gives each entry the number `(..., ⌈m/b⌉, ⌈n/b⌉)` of its tile. On TPUs in bands of
    tiles: XLA would write the numbers of all entries out.

    Args:
      f: the work.
      x: matrices.
      numbers: those of the tiles, which `f` may change before it spreads them.
      block: `b`.
      others: like `x`.
    """
    *batch, m, n = x.shape

    def in_bands(x: jax.Array, numbers: jax.Array, others: jax.Array | None) -> jax.Array:
        spread = functools.partial(_over_columns, block=block, columns=n)
        others = None if others is None else _bands(others, block)
        found = f(materialized(_bands(x, block)), numbers, spread, others)
        return found.reshape(*batch, -1, n)[..., :m, :]

    def at_once(x: jax.Array, numbers: jax.Array, others: jax.Array | None) -> jax.Array:
        return f(x, numbers, functools.partial(over_entries, block=block, shape=x.shape), others)

    return by_platform(tpu=in_bands, default=at_once)(x, numbers, others)


def over_entries(numbers: jax.Array, block: int, shape: tuple[int, ...]) -> jax.Array:
    """The numbers `(..., ⌈m/b⌉, ⌈n/b⌉)` of tiles for the entries of matrices of this shape."""
    *batch, m, n = shape
    wide = _over_columns(numbers, block, n)
    rows = wide.shape[-3], max(min(block, m), 1)
    bands = jnp.broadcast_to(wide, (*batch, *rows, n))
    return bands.reshape(*batch, rows[0] * rows[1], n)[..., :m, :]


def _over_columns(numbers: jax.Array, block: int, columns: int) -> jax.Array:
    """The numbers `(..., ⌈m/b⌉, ⌈n/b⌉)` for the columns of each band, `(..., ⌈m/b⌉, 1, n)`."""
    return jnp.repeat(numbers, block, axis=-1)[..., None, :columns]


def _bands(x: jax.Array, block: int) -> jax.Array:
    """The rows of `x (..., m, n)` in bands of tiles, padded with zeros: `(..., ⌈m/b⌉, b, n)`.

    Columns are not split: an array with an axis of 64 columns is padded to 128 on a TPU.
    """
    *batch, m, n = x.shape
    high = max(min(block, m), 1)
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -m % high), (0, 0)])
    return x.reshape(*batch, x.shape[-2] // high, high, n)
