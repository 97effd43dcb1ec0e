"""Matrix axes: which axes of an array are rows, which are columns, and how they are tiled.

An array with row axes `r`, column axes `c` and other axes `b` becomes `(B, m, n)` with
`m = Π r`, `n = Π c`, `B = Π b`. Rows and columns are then cut into equal tiles (attention heads, or
blocks of at most `block_size`), and each tile is a separate matrix:
`(B · row_tiles · column_tiles, m', n')`. If the block size does not divide the rows, the blocks are
balanced (`k = ⌈m / block_size⌉` blocks of `⌈m / k⌉` rows), and the last one is padded with zero
rows. The same holds for columns. Columns in unequal parts (query, key and value in one kernel) are
split first, and each part is then cut for itself.

*Cost*: a transpose and a reshape per array; tiling adds a pad and one more transpose.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from .._validate import check_fields

LARGE = 128 * 128
"""Elements of a matrix above which a parameter that is a batch (scanned layers, experts) keeps an
array of its own, because its matrices need no copy."""


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Which axes of a parameter are its rows and its columns; all others are batch axes.

    Args:
      rows: axis or axes that form the rows: the inputs. `()` means one row.
      columns: axis or axes that form the columns: the outputs. `()` means one column.
      row_heads: number of equal, contiguous tiles into which the rows are split, each a separate
        matrix (attention heads in a merged axis).
      column_heads: the same for the columns.
      column_parts: sizes of contiguous parts of the columns, which need not be equal; each part is
        treated as a parameter of its own. States name the parts of `kernel` `kernel/0`, `kernel/1`,
        ...
      said_by: who decided, if it was not the user; `summarize` shows it.

    Example:
      A scanned attention kernel `(layers, features, heads, head_dim)`, one matrix per layer:

      >>> import curvax
      >>> axes = curvax.MatrixAxes(rows=1, columns=(2, 3))

      Query (8 heads of 64), key and value (2 heads each) in one kernel `(features, 768)`:

      >>> axes = curvax.MatrixAxes(0, 1, column_parts=(512, 128, 128))
    """

    rows: int | Sequence[int] = 0
    columns: int | Sequence[int] = 1
    row_heads: int = 1
    column_heads: int = 1
    column_parts: Sequence[int] | None = None
    said_by: str = dataclasses.field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self):
        for argument, axes in (("rows", self.rows), ("columns", self.columns)):
            numbers = (axes,) if isinstance(axes, int) else axes
            if not (
                isinstance(numbers, Sequence)
                and all(isinstance(axis, int) and not isinstance(axis, bool) for axis in numbers)
            ):
                raise ValueError(
                    f"{argument} must be an axis (an integer) or a sequence of axes, got {axes!r}."
                )
        check_fields(self)
        if self.column_parts is not None:
            self._check_parts(self.column_parts)
            object.__setattr__(self, "column_parts", tuple(self.column_parts))

    def _check_parts(self, parts: Any) -> None:
        sized = isinstance(parts, Sequence) and len(parts) > 0
        if not (sized and all(type(size) is int and size > 0 for size in parts)):
            raise ValueError(
                "column_parts must be None or the sizes of the parts, a sequence of positive "
                f"integers; got {parts!r}."
            )
        if self.column_heads > 1:
            raise ValueError(
                "column_heads must be 1 with column_parts, which say where columns are cut; got "
                f"column_heads={self.column_heads} and column_parts={parts!r}."
            )

    @property
    def named(self) -> tuple[int, ...]:
        """The axes of the rows and of the columns."""
        return (*as_tuple(self.rows), *as_tuple(self.columns))

    def positions(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The axes of the batch, of the rows and of the columns, counted from 0."""
        rows, columns = (tuple(a % ndim for a in as_tuple(x)) for x in (self.rows, self.columns))
        return tuple(a for a in range(ndim) if a not in (*rows, *columns)), rows, columns

    def exist_in(self, ndim: int) -> bool:
        """Whether an array with `ndim` axes has all these axes."""
        return all(-ndim <= axis < ndim for axis in self.named)

    @property
    def is_guess(self) -> bool:
        """Whether nothing but the number of axes tells that the parameter is a matrix."""
        return self.said_by.startswith("a guess")


@runtime_checkable
class OptaxAxes(Protocol):
    """Optax's dimension numbers: of its Muon, and from 0.2.7 on of its GaLore."""

    @property
    def reduction_axis(self) -> int | Sequence[int]: ...
    @property
    def output_axis(self) -> int | Sequence[int]: ...


AxesEntry = MatrixAxes | OptaxAxes


def as_matrix_axes(entry: AxesEntry) -> MatrixAxes:
    """Converts `entry` to `MatrixAxes`; the dimension numbers of Optax name the same axes."""
    if isinstance(entry, MatrixAxes):
        return entry
    return MatrixAxes(rows=entry.reduction_axis, columns=entry.output_axis)


def kernel_axes(ndim: int, *, output: int, layers: int = 0) -> MatrixAxes:
    """The axes of a kernel of a convolution, which has all axes but that of its outputs as rows.

    The first `layers` axes are of layers.
    """
    output %= ndim
    return MatrixAxes(tuple(axis for axis in range(layers, ndim) if axis != output), output)


def behind(axes: MatrixAxes, ndim: int, layers: int | None) -> MatrixAxes:
    """The axes of one layer, counted from 0 in an array that has layers on an axis, or none."""
    remaining = [axis for axis in range(ndim) if layers is None or axis != layers % ndim]
    rows, columns = (
        remaining[side] if isinstance(side, int) else tuple(remaining[axis] for axis in side)
        for side in (axes.rows, axes.columns)
    )
    return dataclasses.replace(axes, rows=rows, columns=columns)


def as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    """One axis or several, as a tuple."""
    return (axes,) if isinstance(axes, int) else tuple(axes)


class Reading(NamedTuple):
    """Axes that fit a parameter, and their meaning."""

    axes: MatrixAxes
    meaning: str
    ambiguous: bool = False


Readings = tuple[Reading, ...]


def merged(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """One axis, or several as one side of a matrix."""
    return axes[0] if len(axes) == 1 else axes


def reading(shape: tuple[int, ...], axes: MatrixAxes) -> Reading:
    """The reading of all axes but those of the matrix as layers or experts, if there are any."""
    batch, *sides = axes.positions(len(shape))
    if not batch:
        rows, columns = (math.prod(shape[axis] for axis in side) for side in sides)
        return Reading(axes, f"one matrix {rows}×{columns}", ambiguous=True)
    layers, matrix = (
        "×".join(str(size) for axis, size in enumerate(shape) if (axis in batch) == of_layers)
        for of_layers in (True, False)
    )
    along = "" if batch == (*range(len(batch)),) else f", along axis {batch[-1]}"
    return Reading(axes, f"{layers} layers or experts of {matrix}{along}", ambiguous=True)


def stacked(shape: tuple[int, ...], one: MatrixAxes, place: int) -> Reading:
    """The reading of the axes of one layer, with layers on an axis, -1 or counted from 0."""
    where = "the last axis" if place == -1 else f"axis {place}"
    axes = behind(one, len(shape), place)
    return Reading(axes, f"{where} is {shape[place]} layers", ambiguous=True)


@dataclasses.dataclass(frozen=True)
class MatrixForm:
    """The layout of the matrices of a parameter, or of a part of it: how to cut them out."""

    name: str  # the parameter's path; of a part, with its number
    parameter: str  # the parameter's path
    shape: tuple[int, ...]  # of the parameter
    axes: tuple[tuple[int, ...], ...]  # of the batch, of the rows, and of the columns
    batch: int
    rows: int
    columns: int  # of the part
    row_tiles: int
    column_tiles: int
    tile: tuple[int, int]
    start: int = 0  # the first of its columns
    said_by: str = dataclasses.field(default="", compare=False)  # see `MatrixAxes`

    @functools.cached_property
    def count(self) -> int:
        """The number of matrices."""
        return self.batch * self.row_tiles * self.column_tiles

    @functools.cached_property
    def is_tiled(self) -> bool:
        """Whether rows or columns are cut."""
        return self.row_tiles > 1 or self.column_tiles > 1

    @functools.cached_property
    def is_large_batch(self) -> bool:
        """Whether the array as it stands is a batch of matrices of more than `LARGE` elements."""
        large = self.rows * self.columns > LARGE
        return bool(self.axes[0]) and not self.is_tiled and large and not self.is_part

    @functools.cached_property
    def is_part(self) -> bool:
        """Whether the parameter has other columns too."""
        return self.columns < self.all_columns

    @functools.cached_property
    def all_columns(self) -> int:
        """The columns of the parameter."""
        return math.prod(self.shape) // (self.batch * self.rows)

    @functools.cached_property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of the array after padding."""
        return self.row_tiles * self.tile[0], self.column_tiles * self.tile[1]

    @functools.cached_property
    def permutation(self) -> tuple[int, ...]:
        """All axes, in the order of the matrices."""
        return sum(self.axes, ())

    def to_matrices(self, x: jax.Array) -> jax.Array:
        """Cuts an array of shape `self.shape` into `(count, *tile)`."""
        x = x.transpose(self.permutation).reshape(self.batch, self.rows, self.all_columns)
        if self.is_part:
            x = jax.lax.slice_in_dim(x, self.start, self.start + self.columns, axis=2)
        if not self.is_tiled:
            return x
        rows, columns = self.padded
        x = jnp.pad(x, ((0, 0), (0, rows - self.rows), (0, columns - self.columns)))
        x = x.reshape(self.batch, self.row_tiles, self.tile[0], self.column_tiles, self.tile[1])
        return x.transpose(0, 1, 3, 2, 4).reshape(self.count, *self.tile)

    def uncut(self, x: jax.Array) -> jax.Array:
        """The part `(batch, rows, columns)` from its matrices."""
        if not self.is_tiled:
            return x
        x = x.reshape(self.batch, self.row_tiles, self.column_tiles, *self.tile)
        x = x.transpose(0, 1, 3, 2, 4).reshape(self.batch, *self.padded)
        return x[:, : self.rows, : self.columns]


def from_matrices(parts: Sequence[tuple[MatrixForm, jax.Array]]) -> jax.Array:
    """The inverse of `to_matrices`: a parameter from all its parts, in any order."""
    form, pieces = parts[0][0], sorted(parts, key=lambda part: part[0].start)
    columns = [piece.uncut(x) for piece, x in pieces]
    x = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=2)
    inverse = tuple(sorted(form.permutation, key=form.permutation.__getitem__))
    return x.reshape([form.shape[a] for a in form.permutation]).transpose(inverse)


def matrix_forms(
    name: str, shape: tuple[int, ...], axes: MatrixAxes, block_size: int | None = None
) -> tuple[MatrixForm, ...]:
    """Lays out the matrices of the parameter `name` of shape `shape` under `axes`, by its parts."""
    _check_axes(name, shape, axes)
    sides = axes.positions(len(shape))
    batch, rows, all_columns = (math.prod(shape[a] for a in side) for side in sides)
    row_tiles, tile_rows = _tiles(name, "row_heads", rows, axes.row_heads, block_size)
    parts = axes.column_parts or [all_columns]
    if sum(parts) != all_columns:
        raise ValueError(
            f"the parameter {name!r} has {all_columns} columns, but "
            f"column_parts={axes.column_parts} are {sum(parts)}; they must add up to {all_columns}."
        )
    forms = []
    for number, columns in enumerate(parts):
        column_tiles, tile_columns = _tiles(
            name, "column_heads", columns, axes.column_heads, block_size
        )
        form = MatrixForm(
            name=f"{name}/{number}" if len(parts) > 1 else name,
            parameter=name,
            shape=shape,
            axes=sides,
            batch=batch,
            rows=rows,
            columns=columns,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            tile=(tile_rows, tile_columns),
            start=sum(parts[:number]),
            said_by=axes.said_by,
        )
        forms.append(form)
    return tuple(forms)


def _check_axes(name: str, shape: tuple[int, ...], axes: MatrixAxes) -> None:
    ndim = len(shape)
    for what, side in (("rows", as_tuple(axes.rows)), ("columns", as_tuple(axes.columns))):
        for axis in side:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"the parameter {name!r} has shape {shape} and no axis {axis} for "
                    f"{what}={side}; axes must be in {-ndim} to {ndim - 1}."
                )
    _, rows, columns = axes.positions(ndim)
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            f"the parameter {name!r} has shape {shape}; rows={axes.rows} and "
            f"columns={axes.columns} name an axis twice, but each axis may be named only once."
        )


def _tiles(name: str, what: str, size: int, heads: int, block_size: int | None) -> tuple[int, int]:
    """The number and the size of the tiles of a side of this size."""
    if size % heads:
        raise ValueError(
            f"the parameter {name!r} has {size} {what[:-6]}s, which {heads} {what} do not "
            f"divide; {what} must be a divisor of {size}."
        )
    size //= heads
    blocks = 1 if block_size is None else math.ceil(size / block_size)
    if blocks > 1 and heads > 1 and size % blocks:
        raise ValueError(
            f"the parameter {name!r} has heads of {size} {what[:-6]}s, which "
            f"block_size={block_size} cuts unevenly; choose a block_size that divides {size}, "
            "or leave the heads merged."
        )
    return heads * blocks, math.ceil(size / blocks)
