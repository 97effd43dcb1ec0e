"""The way of one array's matrices from where it lies on a mesh to their owners, and back.

Inside `shard_map` a device has a tile of an array, and in it pieces of matrices (`_cuts.py`). It
cuts them into rows of numbers, so that arrays of different shapes and shardings have rows of one
length: each matrix has as many rows as there are devices, or as it has pieces. Mesh axes along rows
or columns divide each matrix, and a device has one row of it. Mesh axes along batch axes divide the
matrices, and a device has more rows of fewer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._cuts import Cut, cut_of, taken
from ._meshes import as_axes

Axes = tuple[str, ...]
Form = Any  # a `MatrixForm`, or a `Stack`
Labels = tuple[tuple[Any, ...], ...]  # of the parts of axes


class Stack(NamedTuple):
    """The form of a stack `(N, m, n)`, with what a `MatrixForm` has."""

    parameter: str
    shape: tuple[int, ...]
    permutation = (0, 1, 2)
    axes = ((0,), (1,), (2,))
    start = 0

    @property
    def count(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> int:
        return self.shape[1]

    @property
    def columns(self) -> int:
        return self.shape[2]

    @property
    def tile(self) -> tuple[int, ...]:
        return self.shape[1:]


class Route(NamedTuple):
    """How an array travels."""

    form: Form
    lies: tuple[Axes, ...]  # the mesh axes along each axis of the array
    cuts: tuple[Cut, Cut]  # of rows and columns
    used: Axes = ()  # the mesh axes that divide it or an array that travels with it
    each: int = 1  # how many rows a device has of a piece, at least

    @classmethod
    def of(cls, form: Form, spec: P, axes: Axes) -> Route:
        """The route of an array that lies like this, on devices along some mesh axes."""
        entries = (*spec, *[None] * (len(form.shape) - len(spec)))
        lies = tuple(tuple(a for a in as_axes(entry) if number([a]) > 1) for entry in entries)

        def cut(side: int, *tiles: int) -> Cut:
            lengths = tuple(form.shape[axis] for axis in form.axes[side])
            return cut_of(lengths, tuple(number(lies[axis]) for axis in form.axes[side]), *tiles)

        rows = cut(1, 0, form.rows, form.tile[0])
        return cls(form, lies, (rows, cut(2, form.start, form.columns, form.tile[1])))

    def divided(self, used: Axes, least: int = 1) -> Route:
        """The route where matrices have so many rows at least, and devices along `used` parts."""
        route = self._replace(used=used, each=1)
        return route._replace(each=-(-least // route.of_matrix))

    @property
    def along(self) -> tuple[Axes, ...]:
        """The mesh axes along the batch, the rows and the columns."""
        return tuple(sum((self.lies[axis] for axis in side), ()) for side in self.form.axes)

    @property
    def idle(self) -> Axes:
        """The mesh axes along which the array is whole, but others are not."""
        return tuple(a for a in self.used if a not in sum(self.lies, ()))

    @property
    def split(self) -> int:
        """Into how many rows a piece is cut."""
        return number(self.idle) * self.each

    @property
    def of_matrix(self) -> int:
        """The number of rows of a matrix."""
        return math.prod(cut.number for cut in self.cuts) * self.split

    @property
    def row_length(self) -> int:
        """The least length of a row."""
        return -(-math.prod(cut.width for cut in self.cuts) // self.split)

    @property
    def count(self) -> int:
        """The number of a device's rows."""
        pieces = math.prod(cut.of_parts.shape[1] for cut in self.cuts)
        return self._sizes[0] * pieces * self.each

    @property
    def assembly(self) -> Any:
        """What two routes have in common that make matrices from rows in the same way."""
        return [cut.key for cut in self.cuts], self._order, self.each

    @property
    def _tile(self) -> list[int]:
        """The shape of a device's tile, its axes in the order of matrices."""
        return [self.form.shape[i] // number(self.lies[i]) for i in self.form.permutation]

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The size of a device's batch, and its numbers of rows and columns."""
        shape = dict(zip(self.form.permutation, self._tile, strict=True))
        return tuple(math.prod(shape[axis] for axis in side) for side in self.form.axes)

    @property
    def _order(self) -> tuple[Labels, Labels, dict[int, int]]:
        """A matrix's rows by pieces along its sides and rows of a piece, and one after the other.

        One after the other they are in the order of devices, where tiles have as much of each.
        """
        pairs = zip(self.along[1:], self.cuts, strict=True)
        rows, columns = (axes if cut.together else () for axes, cut in pairs)
        apart = (*rows, 0), (*columns, 1), (*self.idle, 2)
        devices = (a for a in self.used if a in (*rows, *columns, *self.idle))
        numbers = *(cut.number for cut in self.cuts), self.split
        sizes = {i: n // number(apart[i][:-1]) for i, n in enumerate(numbers)}
        return apart, ((*devices, 0, 1, 2),), sizes

    def tiles(self) -> np.ndarray:
        """Which tile of the rows each matrix is, and which of the columns: `(count, 2)`."""
        rows, columns = (len(cut.whole) for cut in self.cuts)
        places = np.arange(self.form.count)
        return np.stack([places // columns % rows, places % columns], 1)

    def ids(self, parts: int) -> np.ndarray:
        """The numbers of the rows that each device has, `(used devices, rows)`; -1 for none.

        Each matrix has so many numbers, which follow each other.
        """
        (rows, in_rows), (columns, in_columns) = (
            np.moveaxis(cut.of_parts, -1, 0) for cut in self.cuts
        )
        axes, (batch, *sides) = self.form.axes[0], self.along
        shape = [self.form.shape[axis] for axis in axes]
        apart = tuple((*self.lies[axis], i) for i, axis in enumerate(axes))
        first = np.arange(math.prod(shape)).reshape(shape)
        first = regrouped(first, apart, (batch, (*range(len(axes)),)))
        height, width = (len(cut.whole) for cut in self.cuts)
        matrices = np.add.outer(first * height * width, np.add.outer(rows * width, columns))
        apart, together, sizes = self._order
        row = regrouped(np.arange(self.of_matrix), together, apart, sizes)
        ids = matrices[..., None] * parts + row[in_rows][:, :, in_columns]
        ids[:, :, np.logical_or.outer(rows < 0, columns < 0)] = -1
        by_device = batch, (0,), sides[0], (1,), sides[1], (2,), (*self.idle, 3)
        return regrouped(ids, by_device, (self.used, (0, 1, 2, 3)))

    def rows_of_tile(self, x: jax.Array, length: int) -> jax.Array:
        """The device's rows `(count, length)`, from its tile of the array."""
        x = x.transpose(self.form.permutation).reshape(self._sizes)
        for i, (cut, axes) in enumerate(zip(self.cuts, self.along[1:], strict=True), 1):
            x = taken(x, cut.there, functools.partial(device_index, axes), i)
        x = padded(self._pieces(x), self.split * length)
        x = x.reshape(-1, number(self.idle), self.each * length)
        return device_part(x, self.idle, 1).reshape(-1, length)

    def tile_of_rows(self, rows: jax.Array) -> jax.Array:
        """The inverse: the device's tile, with zeros where it is not of the form.

        It needs the rows of all devices along idle axes, `(count, devices, length)`.
        """
        pieces = (cut.of_parts.shape[1] for cut in self.cuts)
        x = rows.reshape(-1, self.each, number(self.idle), rows.shape[-1]).swapaxes(1, 2)
        x = self._joined(x.reshape(self._sizes[0], *pieces, -1))
        for i, (cut, axes) in enumerate(zip(self.cuts, self.along[1:], strict=True), 1):
            x = taken(x, cut.home, functools.partial(device_index, axes), i)
        return x.reshape(self._tile).transpose(np.argsort(self.form.permutation))

    def matrices(self, x: jax.Array, tiles: Callable[[int], Any]) -> jax.Array:
        """Matrices `(k, m, n)` from all their rows `(rows, k, length)`.

        `tiles(side)` are the tiles that the matrices are of a side.
        """
        apart, together, sizes = self._order
        x = jnp.moveaxis(regrouped(x[: self.of_matrix], together, apart, sizes), 3, 0)
        x = self._joined(x.reshape(*x.shape[:3], -1))
        for i, cut in enumerate(self.cuts):
            x = taken(x, cut.whole, functools.partial(tiles, i), i + 1)
        # XLA would leave them turned, and sum in another order than on one device.
        return jax.lax.optimization_barrier(x)

    def rows_of_matrices(self, x: jax.Array, length: int, tiles: Callable[[int], Any]) -> jax.Array:
        """The inverse of `matrices`."""
        for i, cut in enumerate(self.cuts):
            x = taken(x, cut.back, functools.partial(tiles, i), i + 1)
        x = padded(self._pieces(x), self.split * length)
        x = jnp.moveaxis(x.reshape(*x.shape[:3], -1, length), 0, 3)
        apart, together, sizes = self._order
        return regrouped(x, apart, together, sizes)

    def _pieces(self, x: jax.Array) -> jax.Array:
        """Pieces `(k, along rows, along columns, numbers)` of `x`, `(k, rows, columns)`.

        Columns come first in a piece if only they are divided. If they came last, TPUs would pad
        the few columns that a device has of a matrix (to 0.8 GB of temporaries for 24 kernels of
        LLaMA-1B on 256 of them).
        """
        (k, m, n), (rows, columns) = x.shape, (cut.width for cut in self.cuts)
        if self._turned:
            x = x.reshape(-1, rows, n).swapaxes(1, 2)
        else:
            x = x.reshape(-1, rows, n // columns, columns).swapaxes(1, 2)
        return x.reshape(k, m // rows, n // columns, rows * columns)

    def _joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `_pieces`; there may be more numbers."""
        rows, columns = (cut.width for cut in self.cuts)
        k, m, n, _ = x.shape
        x = x[..., : rows * columns]
        if self._turned:
            x = x.reshape(-1, n * columns, rows).swapaxes(1, 2)
        else:
            x = x.reshape(-1, n, rows, columns).swapaxes(1, 2)
        return x.reshape(k, m * rows, n * columns)

    @property
    def _turned(self) -> bool:
        rows, columns = (cut.number for cut in self.cuts)
        return rows == 1 < columns


def travel_spec(form: Form, mesh: Mesh, axes: Axes) -> P:
    """How an array travels on a detour: over mesh axes along its columns, else along its rows.

    Rather along a side that is one axis: heads are often sharded themselves. An array that these
    mesh axes divide in neither way is replicated.
    """
    axes = tuple(a for a in axes if mesh.shape[a] > 1)
    devices = math.prod(mesh.shape[a] for a in axes)
    for side in sorted((form.axes[2], form.axes[1]), key=len):
        for axis in reversed(side):
            if form.shape[axis] % devices == 0:
                return P(*[None] * axis, axes)
    return P()


# Inside a mapped axis.


def number(axes: Sequence[str]) -> int:
    """The number of devices along some mesh axes."""
    return jax.lax.axis_size(tuple(axes))


def device_index(axes: Axes) -> Any:
    """The device's number among those along some mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def device_part(x: jax.Array, axes: Axes, axis: int = 0) -> jax.Array:
    """The device's part of an axis that devices along some mesh axes divide."""
    size = x.shape[axis] // number(axes)
    return jax.lax.dynamic_slice_in_dim(x, device_index(axes) * size, size, axis)


def padded(x: jax.Array, size: int) -> jax.Array:
    """`x` with zeros at the end of its last axis, up to a size."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def regrouped(x: Any, before: Labels, after: Labels, sizes: Mapping[int, int] = {}) -> Any:
    """Splits the first axes of `x` into parts, and merges these in another order.

    `before` and `after` are the parts of each axis: mesh axes, and a number for all else, whose
    size has to be given where an axis has several of them.
    """
    lengths: dict[Any, int] = {}
    for n, parts in zip(x.shape, before, strict=False):
        along = {a: number([a]) if isinstance(a, str) else sizes.get(a) for a in parts}
        along = {a: size for a, size in along.items() if size}
        lengths |= {a: along.get(a, n // math.prod(along.values())) for a in parts}
    order, last = [[*lengths].index(a) for parts in after for a in parts], x.shape[len(before) :]
    x = x.reshape((*lengths.values(), *last))
    x = x.transpose(*order, *range(len(order), x.ndim))
    return x.reshape(*(math.prod(lengths[a] for a in parts) for parts in after), *last)
