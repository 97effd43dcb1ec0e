"""The way of one array's matrices from where it lies on a mesh to their owners, and back.

Inside `shard_map` a device has a tile of an array. It cuts the tile into rows of numbers, so that
arrays of different shapes and shardings have rows of one length: each matrix has as many rows as
there are devices. Mesh axes along rows or columns divide each matrix, and a device has one row of
it. Mesh axes along batch axes divide the matrices, and a device has more rows of fewer. Heads and
blocks that a mesh axis cuts are made whole: the mesh axis moves to another axis of the array, if it
divides one, or the array is gathered along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._meshes import as_axes

Axes = tuple[str, ...]
Form = Any  # a `MatrixForm`, or a `Stack`
Labels = tuple[tuple[Any, ...], ...]  # of the parts of axes


class Stack(NamedTuple):
    """The form of a stack `(N, m, n)`."""

    parameter: str
    shape: tuple[int, ...]
    # What a `MatrixForm` has.
    permutation = (0, 1, 2)
    axes = ((0,), (1,), (2,))
    cut = (False, False)
    row_tiles = 1
    start = 0

    @property
    def count(self) -> int:
        return self.shape[0]

    @property
    def tile(self) -> tuple[int, ...]:
        return self.shape[1:]

    def on_device(self, shape: tuple[int, ...]) -> Stack:
        """The form of a device's part of the stack."""
        return self._replace(shape=shape)

    def to_matrices(self, x: jax.Array) -> jax.Array:
        return x

    uncut = to_matrices

    def joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The stack from its only part."""
        return parts[0]


class Move(NamedTuple):
    """Mesh axes that leave an axis of a tile for another one; from none, or for none."""

    axes: Axes
    source: int | None
    target: int | None

    def there(self, x: jax.Array) -> jax.Array:
        """A tile without its cut."""
        return _moved(x, self.axes, self.source, self.target)

    def back(self, x: jax.Array) -> jax.Array:
        return _moved(x, self.axes, self.target, self.source)


class Route(NamedTuple):
    """How an array travels.

    In a row of numbers, the axes of a matrix that a mesh axis divides come first, until matrices
    are whole. If they came last, TPUs would pad the few columns that a device has of a matrix (to
    0.8 GB of temporaries for 24 kernels of LLaMA-1B on 256 of them).
    """

    form: Form
    tile: Form  # of the array on one device after the moves
    moves: tuple[Move, ...]
    batch: tuple[Axes, ...]  # the mesh axes along each axis of the batch, and heads or blocks
    order: tuple[int, ...]  # of the axes of a matrix in a row
    sides: tuple[Axes, ...]  # in this order, the mesh axes along each
    local: tuple[int, ...]  # and its length on one device
    used: Axes = ()  # the mesh axes that divide it or an array that travels with it

    @classmethod
    def of(cls, form: Form, spec: P, axes: Axes) -> Route:
        """The route of an array that lies like this, on devices along some mesh axes."""
        entries = (*spec, *[None] * (len(form.shape) - len(spec)))
        placed = [tuple(a for a in as_axes(entry) if number([a]) > 1) for entry in entries]
        shape = [n // number(axes) for n, axes in zip(form.shape, placed, strict=True)]
        batch, *sides = form.axes
        uncut = [*batch, *(axis for i in (0, 1) if not form.cut[i] for axis in sides[i])]
        cut = [(i, axis) for i in (0, 1) if form.cut[i] for axis in sides[i]]
        moves, tiles, leaving = [], [(), ()], []
        for i, axis in cut:
            if placed[axis] and sides[i] == (axis,) and form.cuts_evenly(i, shape[axis]):
                tiles[i] = placed[axis]  # a device has whole heads or blocks, as of a batch
            elif placed[axis]:
                leaving.append((axis, placed[axis]))
        # Mesh axes along which the array is whole divide it first, so that less moves.
        idle = [(None, (a,)) for a in axes if leaving and a not in sum(placed, ())]
        for source, places in [*idle, *leaving]:
            size = number(places)
            # Rather not along a batch axis, where a device would have parts of fewer matrices.
            others = [other for other in uncut if shape[other] % size == 0]
            target = max(others, key=lambda x: (x not in batch, shape[x]), default=None)
            if source is not None:
                shape[source], placed[source] = shape[source] * size, ()
            if target is not None:
                shape[target], placed[target] = shape[target] // size, placed[target] + places
            if source != target:
                moves.append(Move(places, source, target))
        tile, along, local = form.on_device(tuple(shape)), [], []
        for side, is_cut, size in zip(sides, form.cut, tile.tile, strict=True):
            along += [()] if is_cut else [placed[axis] for axis in side]
            local += [size] if is_cut else [shape[axis] for axis in side]
        order = sorted(range(len(along)), key=lambda i: not along[i])
        along, local = (tuple(x[i] for i in order) for x in (along, local))
        along_batch = (*(placed[axis] for axis in batch), *tiles)
        return cls(form, tile, (*moves,), along_batch, (*order,), along, local)

    @property
    def inner(self) -> Axes:
        """The mesh axes that divide each matrix."""
        return sum(self.sides, ())

    @property
    def outer(self) -> Axes:
        """The mesh axes that divide the matrices."""
        return sum(self.batch, ())

    @property
    def idle(self) -> Axes:
        """The mesh axes along which the array is whole, but others are not."""
        return tuple(a for a in self.used if a not in self.inner + self.outer)

    @property
    def chunks(self) -> Axes:
        """The mesh axes that divide a matrix's part on one device once more."""
        return self.outer + self.idle

    @property
    def row_length(self) -> int:
        """The least length of a row."""
        return -(-math.prod(self.local) // number(self.chunks))

    @property
    def assembly(self) -> Any:
        """What two routes have in common that make matrices from rows in the same way."""
        return self.order, self.sides, self.local, self.chunks

    @property
    def rows(self) -> int:
        """The number of a device's rows."""
        return self.tile.count * number(self.outer)

    def ids(self) -> np.ndarray:
        """The numbers of the rows that each device has, `(used devices, rows)`.

        A matrix has a row per used device; their numbers follow each other.
        """
        outer, (apart, together) = self.outer, _labels(self.batch)
        others = tuple(a for a in self.used if a not in outer)
        devices = regrouped(np.arange(number(self.used)), (self.used,), (outer, others))
        matrices = np.arange(self.form.count).reshape(_batch(self.form))
        matrices = regrouped(matrices, together, (outer, *apart)).reshape(len(devices), -1)
        ids = np.empty((devices.size, matrices.shape[1], len(devices)), int)
        ids[devices] = matrices[:, None, :, None] * devices.size + devices.T[None, :, None]
        return ids.reshape(devices.size, -1)

    def rows_of_tile(self, x: jax.Array, length: int) -> jax.Array:
        """The device's rows `(count, length)`, from its tile of the array."""
        for move in self.moves:
            x = move.there(x)
        x = self._turned(self.tile.to_matrices(x), self.local)
        x = padded(x.reshape(len(x), -1), number(self.chunks) * length)
        return device_part(x.reshape(-1, number(self.idle), length), self.idle, 1)[:, 0]

    def part(self, rows: jax.Array) -> jax.Array:
        """The inverse: the form's part `(batch, rows, columns)` of the device's tile.

        It needs the rows of all devices along idle axes, `(count, devices, length)`.
        """
        x = rows.reshape(self.tile.count, -1)[:, : math.prod(self.local)]
        x = self._turned_back(x.reshape(len(x), *self.local))
        return self.tile.uncut(x.reshape(-1, *self.tile.tile))

    def whole(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The device's tile of the array as it lies, from all its parts."""
        x = self.tile.joined(parts)
        for move in reversed(self.moves):
            x = move.back(x)
        return x

    def matrices(self, x: jax.Array) -> jax.Array:
        """Matrices `(k, m, n)` from the parts that all devices have of them `(…, k, length)`."""
        apart, together = _labels(self.sides)
        whole = (self.inner, (-1,), (*self.chunks, -2))
        x = regrouped(x, (self.used, (-1,), (-2,)), whole)
        x = x[..., : math.prod(self.local)].reshape(*x.shape[:2], *self.local)
        x = regrouped(x, (self.inner, (-1,), *apart), ((-1,), *together))
        x = self._turned_back(x).reshape(len(x), *self.form.tile)
        # XLA would leave them turned, and sum in another order than on one device.
        return jax.lax.optimization_barrier(x)

    def rows_of_matrices(self, x: jax.Array, length: int) -> jax.Array:
        """The inverse of `matrices`: `(devices, k, length)`."""
        apart, together = _labels(self.sides)
        pairs = zip(self.local, self.sides, strict=True)
        x = self._turned(x, [n * number(axes) for n, axes in pairs])
        x = regrouped(x, ((-1,), *together), (self.inner, (-1,), *apart))
        x = padded(x.reshape(*x.shape[:2], -1), number(self.chunks) * length)
        whole = (self.inner, (-1,), (*self.chunks, -2))
        return regrouped(x, whole, (self.used, (-1,), (-2,)))

    def _turned(self, x: jax.Array, lengths: Sequence[int]) -> jax.Array:
        """Matrices in the order of a row, in which their axes have these lengths."""
        x = x.reshape(len(x), *(lengths[i] for i in np.argsort(self.order)))
        return x.transpose(0, *(1 + i for i in self.order))

    def _turned_back(self, x: jax.Array) -> jax.Array:
        return x.transpose(0, *(1 + int(i) for i in np.argsort(self.order)))


def _moved(x: jax.Array, axes: Axes, source: Any, target: Any) -> jax.Array:
    if source is None:
        return device_part(x, axes, target)
    if target is None:
        return jax.lax.all_gather(x, axes, axis=source, tiled=True)
    return jax.lax.all_to_all(x, axes, target, source, tiled=True)


def _batch(form: Form) -> tuple[int, ...]:
    """The axes of the matrices of an array: of the batch, and heads or blocks of both sides."""
    return (*(form.shape[axis] for axis in form.axes[0]), form.row_tiles, -1)


def _labels(places: Sequence[Axes]) -> tuple[Labels, Labels]:
    """For `regrouped`: axes without the mesh axes along them, and with them."""
    return tuple((i,) for i in range(len(places))), tuple((*a, i) for i, a in enumerate(places))


def travel_spec(form: Form, mesh: Mesh, axes: Axes) -> P:
    """An array sharded over mesh axes along its columns, else along its rows.

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


def regrouped(x: Any, before: Labels, after: Labels) -> Any:
    """Splits the first axes of `x` into parts, and merges these in another order.

    `before` and `after` are the parts of each axis: mesh axes, and a number for all else.
    """
    lengths: dict[Any, int] = {}
    for n, parts in zip(x.shape, before, strict=False):
        along = {a: number([a]) for a in parts if isinstance(a, str)}
        lengths |= {a: along.get(a, n // math.prod(along.values())) for a in parts}
    order, last = [[*lengths].index(a) for parts in after for a in parts], x.shape[len(before) :]
    x = x.reshape((*lengths.values(), *last))
    x = x.transpose(*order, *range(len(order), x.ndim))
    return x.reshape(*(math.prod(lengths[a] for a in parts) for parts in after), *last)
