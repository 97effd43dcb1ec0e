"""What devices exchange in a step: gradients go to the owners of matrices, and updates back.

Each device has rows of numbers of matrices (`_routes.py`). It sends each owner its rows of the
owner's matrices (`_ways.py`), in one exchange for a stack, or for all stacks of parts of arrays. So
a device receives its own matrices, and on the way back its own tiles of the updates.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._layout import StateLayout
from ._routes import Axes, Form, Route, device_index, number, padded
from ._ways import Way, Ways, along_ways, listed

Stacks = dict[str, jax.Array]

TIMES = 16
"""Rows of parts of one array are cut into so many shorter ones at most."""


class ByOwner(NamedTuple):
    """Gradients, parameters or updates of some stacks, by who has them."""

    even: Any  # stacks: the matrices of the device
    # For each round and each of its stacks, one matrix per device. A device uses the one of its own
    # stack; the others are meaningless. In updates: one flat row per round.
    dealt: Any
    shared: Any  # stacks: the matrices that all devices share


class Block(NamedTuple):
    """Matrices, as many on each device; a device has those of one of some stacks."""

    whose: tuple[str, Any]  # a field of `ByOwner`, and the place in it
    places: dict[str, np.ndarray]  # in each stack (devices, k); any where a device has none of it
    kinds: np.ndarray  # which of the stacks a device has; their number: of none


class Deal(NamedTuple):
    """Some blocks, and the ways of their rows."""

    blocks: list[Block]
    picks: list[tuple[str, Way]]  # from the device's rows of a stack to those of a block
    there: tuple[Way, ...]
    back: tuple[Way, ...]
    ids: np.ndarray  # of the rows that come back


class Exchange:
    """The way of the matrices of some arrays, inside a mapped axis."""

    def __init__(
        self,
        layout: StateLayout,
        forms: Mapping[str, tuple[Form, ...]],
        specs: Mapping[str, P],
        axes: Axes,
    ):
        self.layout = layout
        self.axes = tuple(a for a in axes if number([a]) > 1) or axes[:1]
        routes = {
            key: [Route.of(form, specs[form.parameter], self.axes) for form in of_stack]
            for key, of_stack in forms.items()
        }
        self.mesh = {a: number([a]) for a in self.axes}
        every = [route for of_stack in routes.values() for route in of_stack]
        # Devices that have all matrices exchange nothing before the updates.
        self.used = used = self.axes if any(sum(r.lies, ()) for r in every) else ()
        least = max(number(used), *(route.divided(used).of_matrix for route in every))
        routes = {k: [r.divided(used, least) for r in rs] for k, rs in routes.items()}
        beside = _of_one_array(forms)
        lengths = {key: max(r.row_length for r in rs) for key, rs in routes.items()}
        shortest = {key: min(lengths[other] for other in beside[key]) for key in forms}
        times = {key: -(-lengths[key] // shortest[key]) for key in forms}
        self.routes = {  # rows of parts of one array have one length, if it is not too short
            key: [r.divided(used, least * (n if n <= TIMES else 1)) for r in routes[key]]
            for key, n in times.items()
        }
        self.lengths = {key: max(r.row_length for r in rs) for key, rs in self.routes.items()}
        # The rows of a matrix, at most.
        self.parts = {key: max(r.of_matrix for r in rs) for key, rs in self.routes.items()}
        self.first = {}  # for each matrix, the first of the routes that assemble alike
        self.tiles = {}  # and its tiles
        self.begin, self.has, rows = {}, {}, 0  # a stack's first row, and the rows of each device
        for key, of_stack in self.routes.items():
            alike = [r.assembly for r in of_stack]
            firsts, counts = [*map(alike.index, alike)], [r.form.count for r in of_stack]
            self.first[key], self.begin[key] = np.repeat(firsts, counts), rows
            self.tiles[key] = np.concatenate([r.tiles() for r in of_stack])
            starts = rows + np.cumsum([0, *counts]) * self.parts[key]
            ids = [r.ids(self.parts[key]) for r in of_stack]
            ids = [np.where(x < 0, x, i + x) for i, x in zip(starts, ids, strict=False)]
            self.has[key], rows = self._everywhere(np.concatenate(ids, 1)), starts[-1]
        self.exist = np.zeros(rows, bool)  # whether anybody has a row
        for has in self.has.values():
            self.exist[has[has >= 0]] = True
        deals: dict[Any, list[Block]] = {}
        for block in self._blocks():
            # Some devices have more of a stack of parts than others, and less of another stack.
            parts = any(len(beside[key]) > 1 for key in block.places)
            length = max(self.lengths[key] for key in block.places)
            deals.setdefault(length if parts else block.whose, []).append(block)
        self.deals = [*map(self._deal, deals.values())]

    def sent(self, arrays: Mapping[str, jax.Array]) -> ByOwner:
        """The device's matrices, from its tiles of arrays."""
        rows = {
            key: jnp.concatenate(
                [r.rows_of_tile(arrays[r.form.parameter], self.lengths[key]) for r in routes]
            )
            for key, routes in self.routes.items()
        }
        found = ByOwner({}, [{} for _ in self.layout.shares.rounds], {})
        for deal in self.deals:
            for block, stacks in zip(deal.blocks, self._sent(deal, rows), strict=True):
                field, place = block.whose
                getattr(found, field)[place] = stacks if field == "dealt" else stacks[place]
        return found

    def returned(self, updates: ByOwner, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The device's tiles of updates, in the dtypes of arrays like these."""
        back = {key: [] for key in self.routes}  # the numbers of rows, and rows
        for deal in self.deals:
            rows = self._returned(deal, updates)
            for key in dict.fromkeys(key for key, _ in deal.picks):
                back[key].append((deal.ids, rows[:, : self.lengths[key]]))
        tiles: dict[str, Any] = {}
        for key, routes in self.routes.items():
            ids, rows = zip(*back[key], strict=True)
            x = self._pick(np.concatenate(ids, 1), self.has[key])(jnp.concatenate(rows))
            for idle, group in itertools.groupby(routes, key=lambda route: route.idle):
                together = [*group]
                ends = np.cumsum([route.count for route in together])
                own, x = x[: ends[-1]], x[ends[-1] :]
                own = jax.lax.all_gather(own, idle, axis=1) if idle else own
                for route, of_array in zip(together, jnp.split(own, ends[:-1]), strict=True):
                    name, tile = route.form.parameter, route.tile_of_rows(of_array)
                    tiles[name] = tiles[name] + tile if name in tiles else tile
        return {name: tile.astype(like[name].dtype) for name, tile in tiles.items()}

    def _blocks(self) -> Iterator[Block]:
        """The matrices that travel, by who has them."""
        shares = self.layout.shares
        devices = shares.devices
        of_all = np.zeros(devices, int)
        for i, r in enumerate(shares.rounds):
            places = {key: r.places(key, devices)[:, None] for key in r.owners}
            yield Block(("dealt", i), places, r.kinds(devices))
        for key, n in shares.even.items():
            own, left = np.split(np.arange(len(self.first[key])), [n])
            if n:
                yield Block(("even", key), {key: own.reshape(devices, -1)}, of_all)
            if key in shares.shared:
                yield Block(("shared", key), {key: np.tile(left, (devices, 1))}, of_all)

    def _sent(self, deal: Deal, rows: Stacks) -> Iterator[Stacks]:
        """The device's matrices of each block, as of each of its stacks."""
        length = max(self.lengths[key] for key, _ in deal.picks)
        x = jnp.concatenate([padded(pick(rows[key]), length) for key, pick in deal.picks])
        sizes = [next(iter(block.places.values())).shape[1] for block in deal.blocks]
        x = along_ways(x, *deal.there).reshape(-1, sum(sizes), length)
        for block, part in zip(deal.blocks, jnp.split(x, np.cumsum(sizes)[:-1], 1), strict=True):
            yield {
                key: self._matrices(key, part[..., : self.lengths[key]], places, rows[key].dtype)
                for key, places in block.places.items()
            }

    def _returned(self, deal: Deal, updates: ByOwner) -> jax.Array:
        """The device's rows of the updates, from those of its matrices."""
        length = max(self.lengths[key] for key, _ in deal.picks)
        parts = max(self.parts[key] for key, _ in deal.picks)
        blocks = []
        for (field, place), places, kinds in deal.blocks:
            of_stacks = []
            for key, own in places.items():
                x = getattr(updates, field)[place]
                if field == "dealt":  # a flat row
                    m, n = self.layout.stacks[key].shape[1:]
                    x = x[:, : m * n].reshape(-1, m, n)
                x = padded(self._rows(key, x, own), length)
                of_stacks.append(jnp.pad(x, ((0, parts - len(x)), (0, 0), (0, 0))))
            kind = jnp.asarray(np.minimum(kinds, len(of_stacks) - 1), "int32")
            blocks.append(jax.lax.select_n(kind[device_index(self.axes)], *of_stacks))
        return along_ways(jnp.concatenate(blocks, 1).reshape(-1, length), *deal.back)

    # Tables of what each device has and needs, `(devices, …)`.

    def _everywhere(self, table: np.ndarray) -> np.ndarray:
        """A table of all devices, from one that may be of a device that is like the others."""
        return np.tile(table, (self.layout.shares.devices // len(table), 1))

    def _pick(self, has: np.ndarray, wants: np.ndarray) -> Way:
        return Ways(self.mesh, has, wants).at_once()

    def _deal(self, blocks: list[Block]) -> Deal:
        """The ways of some blocks to the owners of their matrices and back."""
        keys = [key for block in blocks for key in block.places]
        parts = np.arange(max(self.parts[key] for key in keys))[:, None]
        has, picks, wants = [], [], []
        for block in blocks:
            of_stacks = []
            for i, (key, places) in enumerate(block.places.items()):
                rows = np.minimum(parts, self.parts[key] - 1)
                ids = self.begin[key] + places[:, None] * self.parts[key] + rows
                wanted = self.exist[ids] & (parts < self.parts[key])
                ids = np.where(wanted & (block.kinds == i)[:, None, None], ids, -1)
                of_stacks.append(ids)
                has.append(self._own(self.has[key], ids))
                picks.append((key, self._pick(self.has[key], has[-1])))
            wants.append(np.max(of_stacks, 0))
        has, wants = np.concatenate(has, 1), np.concatenate(wants, 2)
        wants = wants.reshape(len(wants), -1)
        spread = np.unique(wants[wants >= 0])
        spread = np.append(spread, np.full(-len(spread) % number(self.used), -1))
        spread = self._everywhere(spread.reshape(-1, number(self.used)).T)
        there, ids = Ways.best(self.mesh, has, wants, spread), self._own(has, wants)
        return Deal(blocks, picks, there, Ways.best(self.mesh, wants, ids, spread), ids)

    @staticmethod
    def _own(has: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Those of some rows that each device has."""
        chosen = np.zeros(has.max() + 2, bool)
        chosen[ids] = True
        chosen[-1] = False
        return listed([own[chosen[own]] for own in has])

    def _ways(self, key: str, places: np.ndarray) -> list[tuple[Route, Any]]:
        """The routes that make a stack's matrices differently, and which of the device's each."""
        first = self.first[key]
        ways, own = np.unique(first), first[places]
        if len(ways) > 1:
            own = jnp.asarray(own)[device_index(self.axes)]
        return [(self.routes[key][i], own == i) for i in ways]

    def _tiles(self, key: str, places: np.ndarray, side: int) -> jax.Array:
        """The tiles that the device's matrices of a stack are of a side."""
        return jnp.asarray(self.tiles[key][places, side])[device_index(self.axes)]

    def _matrices(self, key: str, x: jax.Array, places: np.ndarray, dtype: Any) -> jax.Array:
        """Matrices of a stack from rows of all devices, each assembled in its way."""
        matrices: Any = None
        x = x.astype(dtype)
        tiles = functools.partial(self._tiles, key, places)
        for route, own in self._ways(key, places):
            new = route.matrices(x, tiles)
            matrices = new if matrices is None else jnp.where(own[:, None, None], new, matrices)
        return matrices

    def _rows(self, key: str, x: jax.Array, places: np.ndarray) -> jax.Array:
        """The inverse: `(parts, k, length)`."""
        rows: Any = None
        tiles = functools.partial(self._tiles, key, places)
        for route, own in self._ways(key, places):
            new = route.rows_of_matrices(x, self.lengths[key], tiles)
            new = jnp.pad(new, ((0, self.parts[key] - len(new)), (0, 0), (0, 0)))
            rows = new if rows is None else jnp.where(own[None, :, None], new, rows)
        return rows


def _of_one_array(forms: Mapping[str, tuple[Form, ...]]) -> dict[str, set[str]]:
    """For each stack, those that have parts of the arrays that it has parts of; itself too."""
    stacks: dict[str, set[str]] = {}
    for key, of_stack in forms.items():
        for form in of_stack:
            stacks.setdefault(form.parameter, set()).add(key)
    return {key: set.union(*(stacks[f.parameter] for f in fs)) for key, fs in forms.items()}
