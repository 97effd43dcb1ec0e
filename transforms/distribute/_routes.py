"""The way of one array's matrices from where it lies on a mesh to their owners, and back.

Inside `shard_map` a device has a tile of an array. It cuts the tile into its parts of all matrices,
one row of numbers each (`Route.rows`), so that arrays of different shapes and shardings have rows
of one length. Mesh axes along rows or columns of matrices divide each matrix. Mesh axes along batch
axes divide the matrices; devices exchange parts along these axes first, so that each has a part of
every matrix. Heads and blocks that a mesh axis cuts are made whole likewise: the mesh axis moves to
another axis of the array, if it divides one, or the array is gathered along it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._meshes import as_axes

Axes = tuple[str, ...]


Form = Any  # a `MatrixForm`, or a `Stack`


class Stack(NamedTuple):
    """The form of a stack `(N, m, n)`."""

    parameter: str
    shape: tuple[int, ...]
    permutation = (0, 1, 2)
    sides = (1, 1)
    tiles = (1, 1)
    start = 0
    is_part = False

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self.shape[0]

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of each."""
        return self.shape[1], self.shape[2]

    @property
    def columns(self) -> int:
        """The columns of each."""
        return self.shape[2]


class Move(NamedTuple):
    """Mesh axes that leave an axis of a tile for another one, or for none."""

    axes: Axes
    source: int
    target: int | None

    def there(self, x: jax.Array) -> jax.Array:
        """A tile without its cut."""
        if self.target is None:
            return jax.lax.all_gather(x, self.axes, axis=self.source, tiled=True)
        return jax.lax.all_to_all(x, self.axes, self.target, self.source, tiled=True)

    def back(self, x: jax.Array, size: int) -> jax.Array:
        """The inverse, for so many devices."""
        if self.target is None:
            length = x.shape[self.source] // size
            start = jax.lax.axis_index(self.axes) * length
            return jax.lax.dynamic_slice_in_dim(x, start, length, self.source)
        return jax.lax.all_to_all(x, self.axes, self.source, self.target, tiled=True)


@dataclasses.dataclass(frozen=True)
class Route:
    """How an array travels. Axes are in the order batch, rows, columns."""

    form: Form
    sizes: Mapping[str, int] = dataclasses.field(repr=False)  # of mesh axes
    moves: tuple[Move, ...]
    tile: tuple[int, ...]  # the array on one device after the moves
    batch: tuple[Axes, ...]  # the mesh axes along each axis of the batch
    sides: tuple[Axes, ...]  # and along each other one
    local: tuple[int, ...]  # these other ones on one device, of one matrix
    used: Axes = ()  # by all arrays that travel together
    length: int = 0  # of a row

    @classmethod
    def of(cls, form: Form, spec: P, sizes: Mapping[str, int]) -> Route:
        """The route of an array that lies like this."""
        entries = [*spec, *[None] * (len(form.shape) - len(spec))]
        placed = [as_axes(entries[i]) for i in form.permutation]
        local = [form.shape[i] // number(placed[j], sizes) for j, i in enumerate(form.permutation)]
        first, second = form.sides[0], sum(form.sides)
        row_tiles, column_tiles = form.tiles
        cut = (*range(first, second),) if row_tiles > 1 else ()
        if column_tiles > 1 or form.is_part:
            cut += (*range(second, len(local)),)
        moves = []
        for i in cut:
            size = number(placed[i], sizes)
            if size == 1:
                continue
            # Along a batch axis the parts would be exchanged once more.
            others = [j for j in range(len(local)) if j not in cut and local[j] % size == 0]
            target = max(others, key=lambda j: (j >= first, local[j]), default=None)
            moves.append(Move(placed[i], i, target))
            if target is not None:
                placed[target] += placed[i]
                local[target] //= size
            local[i] *= size
            placed[i] = ()
        whole = [(form.tile[0],) if row_tiles > 1 else (*local[first:second],)]
        merged = column_tiles > 1 or form.is_part
        whole += [(form.tile[1],) if merged else (*local[second:],)]
        sides = [((),) if row_tiles > 1 else (*placed[first:second],)]
        sides += [((),) if merged else (*placed[second:],)]
        batch = (*placed[:first], (), ())
        return cls(
            form, sizes, (*moves,), (*local,), batch, sides[0] + sides[1], whole[0] + whole[1]
        )

    @property
    def inner(self) -> Axes:
        """The mesh axes that divide each matrix."""
        return sum(self.sides, ())

    @property
    def outer(self) -> Axes:
        """The mesh axes that divide the matrices."""
        return sum(self.batch, ())

    @property
    def chunks(self) -> Axes:
        """The mesh axes that divide a matrix's part on one device once more."""
        return self.outer + tuple(a for a in self.used if a not in self.inner + self.outer)

    def travelling(self, used: Axes) -> Route:
        """The route beside others, which together use these mesh axes."""
        route = dataclasses.replace(self, used=used)
        length = -(-math.prod(self.local) // number(route.chunks, self.sizes))
        return dataclasses.replace(route, length=length)

    @property
    def assembly(self) -> Any:
        """Routes with equal ones make matrices from rows in the same way."""
        return self.sides, self.local, self.chunks, self.length

    def rows(self, x: jax.Array) -> jax.Array:
        """The device's parts of all matrices `(count, length)`, from its tile of the array."""
        x = x.transpose(self.form.permutation)
        for move in self.moves:
            x = move.there(x)
        x = self._cut(x)
        batch, own, rest = x.shape[: len(self.batch)], self.outer, self.chunks[len(self.outer) :]
        x = padded(x.reshape(*batch, -1), number(self.chunks, self.sizes) * self.length)
        x = x.reshape(*batch, number(own, self.sizes), number(rest, self.sizes), self.length)
        x = own_entry(x, rest, x.ndim - 2)
        x = jax.lax.all_to_all(x, own, len(batch), 0) if own else x.squeeze(-2)
        x = woven(x.reshape(*self._sizes(own), *batch, -1), own, (*self.batch, ()))
        return x.reshape(self.form.count, self.length)

    def array(self, rows: jax.Array) -> jax.Array:
        """The device's tile of the form's part of the array, its columns merged if it is cut."""
        batch, own, rest = self.tile[: self.form.sides[0]], self.outer, self.chunks
        batch, rest = (*batch, *self.form.tiles), rest[len(own) :]
        whole = [n * number(a, self.sizes) for n, a in zip(batch, self.batch, strict=True)]
        x = rows.reshape(*whole, self.length)
        x = unwoven(x, own, (*self.batch, ()), self.sizes)
        if own:
            x = x.reshape(number(own, self.sizes), *batch, self.length)
            x = jax.lax.all_to_all(x, own, 0, len(batch))
        if rest:
            x = jax.lax.all_gather(x, rest, axis=x.ndim - 1)
        x = x.reshape(*batch, -1)[..., : math.prod(self.local)]
        return self._joined(x.reshape(*batch, *self.local))

    def whole(self, x: jax.Array) -> jax.Array:
        """The device's tile of the array as it lies, from all its parts."""
        x = x.reshape(self.tile)
        for move in reversed(self.moves):
            x = move.back(x, number(move.axes, self.sizes))
        inverse = sorted(range(x.ndim), key=self.form.permutation.__getitem__)
        return x.transpose(inverse)

    def matrices(self, x: jax.Array) -> jax.Array:
        """Matrices `(k, m, n)` from the parts that all devices have of them `(…, k, length)`."""
        x = x.reshape(*self._sizes(self.used), *x.shape[-2:])
        x = woven(x, self.used, ((), self.chunks))[..., : math.prod(self.local)]
        x = x.reshape(*x.shape[:-1], *self.local)
        inner = tuple(a for a in self.used if a in self.inner)
        x = woven(x, inner, ((), *self.sides))
        return x.reshape(len(x), *self.form.tile)

    def parts(self, x: jax.Array) -> jax.Array:
        """The inverse of `matrices`: `(devices, k, length)`."""
        number_of, inner = len(x), tuple(a for a in self.used if a in self.inner)
        sides = (number(a, self.sizes) for a in self.sides)
        x = x.reshape(-1, *(n * size for n, size in zip(self.local, sides, strict=True)))
        x = unwoven(x, inner, ((), *self.sides), self.sizes)
        x = x.reshape(*x.shape[: len(inner) + 1], -1)
        x = padded(x, number(self.chunks, self.sizes) * self.length)
        own = ((),) * (len(inner) + 1)
        x = unwoven(x, self.chunks, (*own, self.chunks), self.sizes)
        names = (*self.chunks, *inner)
        order = [names.index(a) for a in self.used]
        x = x.transpose(*order, len(names), len(names) + 1)
        return x.reshape(-1, number_of, self.length)

    def _sizes(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self.sizes[a] for a in axes)

    def _cut(self, x: jax.Array) -> jax.Array:
        """Heads and blocks as two more axes of the batch."""
        first, second = self.form.sides[0], sum(self.form.sides)
        batch, rows, columns = x.shape[:first], x.shape[first:second], x.shape[second:]
        (row_tiles, column_tiles), (m, n) = self.form.tiles, self.form.tile
        if self.form.is_part:
            x = x.reshape(*batch, *rows, -1)
            start = self.form.start
            x = jax.lax.slice_in_dim(x, start, start + self.form.columns, axis=x.ndim - 1)
            columns = x.shape[second:]
        if row_tiles > 1:
            x = x.reshape(*batch, -1, *columns)
            x = padded(x, row_tiles * m, first)
            rows = (m,)
        x = x.reshape(*batch, row_tiles, *rows, *columns)
        if column_tiles > 1:
            x = padded(x.reshape(*batch, row_tiles, *rows, -1), column_tiles * n)
            columns = (n,)
        x = x.reshape(*batch, row_tiles, *rows, column_tiles, *columns)
        return jnp.moveaxis(x, first + 1 + len(rows), first + 1)

    def _joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `_cut`; the columns of a part stay apart."""
        first, (row_tiles, column_tiles), (m, n) = (
            self.form.sides[0],
            self.form.tiles,
            self.form.tile,
        )
        batch, sides = x.shape[:first], x.shape[first + 2 :]
        rows = sides[: 1 if row_tiles > 1 else self.form.sides[1]]
        columns = sides[len(rows) :]
        x = jnp.moveaxis(x, first + 1, first + 1 + len(rows))
        if column_tiles > 1:
            x = x.reshape(*batch, row_tiles, *rows, column_tiles * n)[..., : self.form.columns]
            columns = (self.form.columns,)
        if row_tiles > 1:
            x = x.reshape(*batch, row_tiles * m, *columns)
            x = jax.lax.slice_in_dim(
                x, 0, math.prod(self.tile[first : sum(self.form.sides)]), axis=first
            )
        return x.reshape(*self.tile[: sum(self.form.sides)], *columns)


def travel_spec(form: Form, mesh: Mesh, axes: Axes) -> P:
    """An array sharded over mesh axes along its columns, else along its rows.

    Rather along a side that is one axis: heads are often sharded themselves. An array that these
    mesh axes divide in neither way is replicated.
    """
    first, second = form.sides[0], sum(form.sides)
    for side in sorted((form.permutation[second:], form.permutation[first:second]), key=len):
        for axis in reversed(side):
            if form.shape[axis] % number(axes, mesh.shape) == 0:
                return P(*[None] * axis, axes)
    return P()


def number(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(sizes[a] for a in axes)


def padded(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """`x` with zeros at the end of an axis, up to a size."""
    axis %= x.ndim
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)]) if missing else x


def woven(x: jax.Array, names: Axes, places: Sequence[Axes]) -> jax.Array:
    """Merges leading axes into others: those of `names` into the axes whose place has them.

    The names that no place has stay leading.
    """
    staying = [i for i, name in enumerate(names) if not any(name in own for own in places)]
    order, shape = staying.copy(), [x.shape[i] for i in staying]
    for i, own in enumerate(places, len(names)):
        merged = [*(names.index(a) for a in own), i]
        order += merged
        shape.append(math.prod(x.shape[j] for j in merged))
    return x.transpose(order).reshape(shape)


def unwoven(
    x: jax.Array, names: Axes, places: Sequence[Axes], sizes: Mapping[str, int]
) -> jax.Array:
    """Splits axes: the parts that their places name become leading ones, in the order of names."""
    shape, where, order = [], {}, []
    for n, own in zip(x.shape, places, strict=True):
        for a in own:
            where[a] = len(shape)
            shape.append(sizes[a])
        order.append(len(shape))
        shape.append(n // number(own, sizes))
    return x.reshape(shape).transpose([*(where[a] for a in names), *order])


def own_entry(x: jax.Array, axes: Axes, axis: int = 0) -> jax.Array:
    """A device's entry of an axis that has one for each device along some mesh axes."""
    own = jax.lax.axis_index(axes) if axes else 0
    return jax.lax.dynamic_index_in_dim(x, own, axis, keepdims=False)
