"""How one array is seen as matrices: which axes are rows, which are columns, how it is tiled.

An array `(…)` with rows `r`, columns `c` and other axes `b` becomes `(B, m, n)` with
`m = Π r`, `n = Π c`, `B = Π b`. The rows are then cut into equal tiles (attention heads, or blocks
of at most `block_size`), the columns alike, and every tile is a matrix of its own:
`(B · row_tiles · column_tiles, m', n')`. Where a block size does not divide, blocks are balanced
(`k = ⌈m / block_size⌉` blocks of `⌈m / k⌉` rows) and the last is padded with zero rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from .._validate import check_positive_int


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are its rows and its columns; all others are batch axes.

    Args:
      rows: axis or axes that form the rows (the input side in Flax). `()` means one row.
      columns: axis or axes that form the columns. `()` means one column.
      row_heads: number of equal, contiguous parts into which the rows are split, each a
        matrix of its own (attention heads in a merged axis).
      column_heads: the same for the columns.

    Example:
      A scanned attention kernel `(layers, features, heads, head_dim)`, one matrix per layer:

      >>> import curvax
      >>> axes = curvax.MatrixAxes(rows=1, columns=(2, 3))
    """

    rows: int | Sequence[int] = 0
    columns: int | Sequence[int] = 1
    row_heads: int = 1
    column_heads: int = 1

    def __post_init__(self):
        for argument, axes in (("rows", self.rows), ("columns", self.columns)):
            given = (axes,) if isinstance(axes, int) else axes
            if not (
                isinstance(given, Sequence)
                and all(isinstance(axis, int) and not isinstance(axis, bool) for axis in given)
            ):
                raise ValueError(
                    f"{argument} must be an integer or a sequence of integers, got {axes!r}."
                )
        check_positive_int("row_heads", self.row_heads)
        check_positive_int("column_heads", self.column_heads)


AxesEntry = MatrixAxes | optax.contrib.MuonDimensionNumbers


def as_matrix_axes(entry: AxesEntry) -> MatrixAxes:
    """`entry` as `MatrixAxes`; Optax's `MuonDimensionNumbers` mean the same axes."""
    if isinstance(entry, optax.contrib.MuonDimensionNumbers):
        return MatrixAxes(rows=entry.reduction_axis, columns=entry.output_axis)
    return entry


@dataclasses.dataclass(frozen=True)
class MatrixForm:
    """The matrices of one parameter: how to cut them out of it and put them back."""

    name: str
    shape: tuple[int, ...]
    permutation: tuple[int, ...]
    batch: int
    rows: int
    columns: int
    row_tiles: int
    column_tiles: int
    tile: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.batch * self.row_tiles * self.column_tiles

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of all tiles side by side."""
        return self.row_tiles * self.tile[0], self.column_tiles * self.tile[1]

    @property
    def keeps_columns(self) -> bool:
        """Whether the array's last axis is the matrices' columns, so that it may stay cut there."""
        in_order = self.permutation == tuple(range(len(self.shape)))
        whole = self.row_tiles == self.column_tiles == 1
        # With Explicit axes JAX merges no others of an array that is cut.
        unmerged = self.shape[-2:] == (self.rows, self.columns) and len(self.shape) <= 3
        return in_order and whole and unmerged

    def to_matrices(self, x: jax.Array) -> jax.Array:
        """Cuts an array of shape `self.shape` into `(count, *tile)`."""
        x = x.transpose(self.permutation).reshape(self.batch, self.rows, self.columns)
        if self.row_tiles == self.column_tiles == 1:
            return x
        rows, columns = self.padded
        x = jnp.pad(x, ((0, 0), (0, rows - self.rows), (0, columns - self.columns)))
        x = x.reshape(self.batch, self.row_tiles, self.tile[0], self.column_tiles, self.tile[1])
        return x.transpose(0, 1, 3, 2, 4).reshape(self.count, *self.tile)

    def from_matrices(self, x: jax.Array) -> jax.Array:
        """Puts `(count, *tile)` together again; the inverse of `to_matrices`."""
        if self.row_tiles > 1 or self.column_tiles > 1:
            x = x.reshape(self.batch, self.row_tiles, self.column_tiles, *self.tile)
            x = x.transpose(0, 1, 3, 2, 4).reshape(self.batch, *self.padded)
            x = x[:, : self.rows, : self.columns]
        inverse = tuple(sorted(range(len(self.shape)), key=self.permutation.__getitem__))
        return x.reshape([self.shape[a] for a in self.permutation]).transpose(inverse)


def matrix_form(
    name: str, shape: tuple[int, ...], axes: MatrixAxes, block_size: int | None = None
) -> MatrixForm:
    """The form of the parameter `name` of shape `shape` under `axes`.

    Raises:
      ValueError: naming the parameter, if an axis is absent or named twice or if the number of
        heads does not divide its axis.
    """
    ndim = len(shape)

    def positions(what: str, given: int | Sequence[int]) -> tuple[int, ...]:
        given = (given,) if isinstance(given, int) else tuple(given)
        for axis in given:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{name!r} has shape {shape}: there is no axis {axis} for {what}={given}; "
                    f"axes run from {-ndim} to {ndim - 1}."
                )
        return tuple(axis % ndim for axis in given)

    rows, columns = positions("rows", axes.rows), positions("columns", axes.columns)
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"{name!r} has shape {shape}: rows={axes.rows} and columns={axes.columns} name an axis "
            "twice; every axis may be named once."
        )
    batch = tuple(a for a in range(ndim) if a not in (*rows, *columns))
    sizes = [math.prod(shape[a] for a in part) for part in (batch, rows, columns)]

    def tiles(what: str, size: int, heads: int) -> tuple[int, int]:
        if size % heads:
            raise ValueError(f"{name!r}: {heads} {what} do not divide its {size} {what[:-6]}s.")
        size //= heads
        blocks = 1 if block_size is None else math.ceil(size / block_size)
        if blocks > 1 and heads > 1 and size % blocks:
            raise ValueError(
                f"{name!r}: block_size={block_size} cuts a head of {size} {what[:-6]}s unevenly; "
                "choose a block_size that divides it, or leave the heads merged."
            )
        return heads * blocks, math.ceil(size / blocks)

    row_tiles, tile_rows = tiles("row_heads", sizes[1], axes.row_heads)
    column_tiles, tile_columns = tiles("column_heads", sizes[2], axes.column_heads)
    return MatrixForm(
        name=name,
        shape=shape,
        permutation=(*batch, *rows, *columns),
        batch=sizes[0],
        rows=sizes[1],
        columns=sizes[2],
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        tile=(tile_rows, tile_columns),
    )
