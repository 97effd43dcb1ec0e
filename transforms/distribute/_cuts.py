"""Where matrices and devices cut the rows or the columns of an array.

An array's rows lie on devices in parts, and its matrices take them in tiles. What a part and a tile
have in common, in one run, is a piece: it travels from the device that has the part to the one that
owns the tile's matrix. Pieces have one width, so longer runs are cut, and shorter ones padded.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PIECES = 2
"""A tile is cut into so many pieces for each device at most, if that spares padding."""


class Cut(NamedTuple):
    """The pieces of rows or columns, and tables of places; a place beyond the last one is zero."""

    number: int  # of the pieces of a tile
    width: int
    of_parts: np.ndarray  # (parts, pieces, 2): tile and number of a piece; -1 where a part has none
    together: bool  # whether each tile has as many pieces of every part, in the parts' order
    there: np.ndarray  # (parts, pieces · width): places in the part
    home: np.ndarray  # (parts, length): places in the part's pieces
    whole: np.ndarray  # (tiles, length of a tile): places in the tile's pieces
    back: np.ndarray  # (tiles, number · width): places in the tile

    @property
    def key(self) -> Any:
        """What two cuts have in common whose tiles are assembled alike."""
        tables = (x[:1] if _alike(x) else x for x in (self.whole, self.back))
        return self.number, self.width, self.together, *(x.tobytes() for x in tables)


@functools.cache
def cut_of(
    lengths: tuple[int, ...], parts: tuple[int, ...], start: int, length: int, tile: int
) -> Cut:
    """The cut of axes that together are rows, each divided into so many parts.

    Tiles are in `length` rows from `start` on; the last may be shorter, and ends with zeros.
    """
    split = [n for axis, k in zip(lengths, parts, strict=True) for n in (k, axis // k)]
    rows = np.arange(math.prod(lengths)).reshape(split)
    rows = rows.transpose(*range(0, rows.ndim, 2), *range(1, rows.ndim, 2))
    rows = rows.reshape(math.prod(parts), -1) - start  # of each part
    tiles = np.where((rows >= 0) & (rows < length), rows // tile, -1)
    begins = np.diff(rows, axis=1, prepend=-2) != 1
    begins |= np.diff(tiles, axis=1, prepend=-2) != 0
    begins[:, 0] = True
    first = np.flatnonzero(begins)
    size = np.diff(first, append=rows.size)
    first, size = (x[tiles.flat[first] >= 0] for x in (first, size))

    def pieces(width: int) -> int:
        """The number of pieces of a tile."""
        return int(np.bincount(tiles.flat[first], -(-size // width)).max())

    widths = [int(np.gcd.reduce(size)), int(size.max())]
    widths = [w for w in widths if pieces(w) <= PIECES * len(rows)] or widths[1:]
    width = min(widths, key=lambda w: (pieces(w) * w, -w))
    count = -(-size // width)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    first = np.repeat(first, count) + width * within
    size = np.minimum(np.repeat(size, count) - width * within, width)
    part, place = np.divmod(first, rows.shape[1])
    of, offset = tiles.flat[first], rows.flat[first] % tile
    rank, number = ranks(np.stack([part, of]))
    each, of_tile = rank.max() + 1, number.max() + 1
    of_parts = np.full((len(rows), each, 2), -1)
    of_parts[part, rank] = np.stack([of, number], 1)
    counts = np.zeros((-(-length // tile), len(rows)), int)
    np.add.at(counts, (of, part), 1)
    there = np.full((len(rows), each * width), rows.shape[1])
    home = np.full(rows.shape, each * width)
    whole = np.full((len(counts), tile), of_tile * width)
    back = np.full((len(counts), of_tile * width), tile)
    inside = np.arange(width)
    # The zeros at the end of a tile that is shorter are those behind its pieces.
    ends = np.minimum(offset[:, None] + inside, tile - 1)
    whole[of[:, None], ends] = number[:, None] * width + inside
    i, j = np.nonzero(inside < size[:, None])
    in_part, in_tile = rank[i] * width + j, number[i] * width + j
    there[part[i], in_part], home[part[i], place[i] + j] = place[i] + j, in_part
    back[of[i], in_tile], whole[of[i], offset[i] + j] = offset[i] + j, in_tile
    together = bool((counts == counts[0, 0]).all())
    return Cut(int(of_tile), width, of_parts, together, there, home, whole, back)


def taken(x: jax.Array, table: np.ndarray, rows: Callable[[], Any], axis: int) -> jax.Array:
    """The places of an axis that a row of a table names, and zeros for those beyond the axis.

    `rows` says which row: one for all of `x`, or one for each entry of the first axis.
    """
    if _alike(table):
        places = table[0]
        inside = np.flatnonzero(places < x.shape[axis])
        first, last = places[inside[0]], places[inside[-1]] + 1
        if np.array_equal(places[inside[0] : inside[-1] + 1], np.arange(first, last)):
            x = jax.lax.slice_in_dim(x, first, last, axis=axis)
            ends = [(0, 0)] * x.ndim
            ends[axis] = (int(inside[0]), len(places) - int(inside[-1]) - 1)
            return jnp.pad(x, ends)
    places = jnp.asarray(table)[rows()]
    if places.ndim == 1:
        return jnp.take(x, places, axis, mode="fill", fill_value=0)
    places = jnp.expand_dims(places, [i for i in range(1, x.ndim) if i != axis])
    return jnp.take_along_axis(x, places, axis, mode="fill", fill_value=0)


def _alike(table: np.ndarray) -> bool:
    return bool((table == table[0]).all())


def ranks(x: np.ndarray) -> np.ndarray:
    """The number of equal entries before each, row by row."""
    order = np.argsort(x, axis=1, kind="stable")
    ordered, places = np.take_along_axis(x, order, 1), np.arange(x.shape[1])
    begins = np.where(np.diff(ordered, axis=1, prepend=-2) != 0, places, 0)
    found = np.empty_like(order)
    np.put_along_axis(found, order, places - np.maximum.accumulate(begins, axis=1), 1)
    return found
