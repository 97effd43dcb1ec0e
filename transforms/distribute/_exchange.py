"""What devices exchange in a step: gradients go to the owners of matrices, and updates back.

Each device has rows of numbers of matrices (`_routes.py`). It sends each owner its rows of the
owner's matrices (`_ways.py`), in one exchange for a stack. So a device receives its own matrices,
and on the way back its own tiles of the updates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._layout import StateLayout
from ._routes import Axes, Form, Route, device_index, number, padded
from ._ways import Way, Ways, along_ways, listed

Stacks = dict[str, jax.Array]


class ByOwner(NamedTuple):
    """Gradients, parameters or updates of some stacks, by who has them."""

    even: Any  # stacks: the matrices of the device
    # For each round and each of its stacks, one matrix per device. A device uses the one of its own
    # stack; the others are meaningless. In updates: one flat row per round.
    dealt: Any
    shared: Any  # stacks: the matrices that all devices share


class Deal(NamedTuple):
    """Matrices of some stacks, as many on each device, and the ways of their rows."""

    places: dict[str, np.ndarray]  # in each stack (devices, k); any where a device has none of it
    kinds: np.ndarray  # of each device's matrices: an index into the stacks
    picks: dict[str, Way]  # from the device's rows of a stack to those of these matrices
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
        self.layout, shares = layout, layout.shares
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
        self.routes = {k: [r.divided(used, least) for r in rs] for k, rs in routes.items()}
        # The rows of a matrix, at most.
        self.parts = max(r.of_matrix for of_stack in self.routes.values() for r in of_stack)
        self.lengths = {key: max(r.row_length for r in rs) for key, rs in self.routes.items()}
        self.first = {}  # for each matrix, the first of the routes that assemble alike
        self.tiles = {}  # and its tiles
        self.begin, self.has, rows = {}, {}, 0  # a stack's first row, and the rows of each device
        for key, of_stack in self.routes.items():
            alike = [r.assembly for r in of_stack]
            firsts, counts = [*map(alike.index, alike)], [r.form.count for r in of_stack]
            self.first[key], self.begin[key] = np.repeat(firsts, counts), rows
            self.tiles[key] = np.concatenate([r.tiles() for r in of_stack])
            starts = rows + np.cumsum([0, *counts]) * self.parts
            ids = [r.ids(self.parts) for r in of_stack]
            ids = [np.where(x < 0, x, i + x) for i, x in zip(starts, ids, strict=False)]
            self.has[key], rows = self._everywhere(np.concatenate(ids, 1)), starts[-1]
        self.exist = np.zeros(rows, bool)  # whether anybody has a row
        for has in self.has.values():
            self.exist[has[has >= 0]] = True
        devices = np.arange(shares.devices)
        self.even, self.shared = {}, {}
        for key, n in shares.even.items():
            own, left = np.split(np.arange(len(self.first[key])), [n])
            if n:
                self.even[key] = self._deal({key: own.reshape(len(devices), -1)}, {key: devices})
            if key in shares.shared:
                left = np.tile(left, (len(devices), 1))
                self.shared[key] = self._deal({key: left}, {key: devices})
        self.dealt = []
        for r in shares.rounds:
            places = {key: r.places(key, len(devices))[:, None] for key in r.owners}
            self.dealt.append(self._deal(places, r.owners))

    def sent(self, arrays: Mapping[str, jax.Array]) -> ByOwner:
        """The device's matrices, from its tiles of arrays."""
        rows = {
            key: jnp.concatenate(
                [r.rows_of_tile(arrays[r.form.parameter], self.lengths[key]) for r in routes]
            )
            for key, routes in self.routes.items()
        }
        dealt = [self._sent(deal, rows) for deal in self.dealt]
        even, shared = (
            {key: self._sent(deal, rows)[key] for key, deal in deals.items()}
            for deals in (self.even, self.shared)
        )
        return ByOwner(even, dealt, shared)

    def returned(self, updates: ByOwner, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The device's tiles of updates, in the dtypes of arrays like these."""
        back = []
        for deals, of in (self.even, updates.even), (self.shared, updates.shared):
            back += [(deal, self._returned(deal, {key: of[key]})) for key, deal in deals.items()]
        for deal, row in zip(self.dealt, updates.dealt, strict=True):
            shapes = {key: self.layout.stacks[key].shape[1:] for key in deal.places}
            of = {key: row[:, : m * n].reshape(-1, m, n) for key, (m, n) in shapes.items()}
            back.append((deal, self._returned(deal, of)))
        tiles: dict[str, Any] = {}
        for key, routes in self.routes.items():
            own = [(deal.ids, x[:, : self.lengths[key]]) for deal, x in back if key in deal.places]
            ids, rows = zip(*own, strict=True)
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

    def _sent(self, deal: Deal, rows: Stacks) -> Stacks:
        """The device's matrices, as of each of the stacks."""
        length = max(self.lengths[key] for key in deal.places)
        x = jnp.concatenate([padded(pick(rows[key]), length) for key, pick in deal.picks.items()])
        x = along_ways(x, *deal.there).reshape(self.parts, -1, length)
        return {
            key: self._matrices(key, x[..., : self.lengths[key]].astype(rows[key].dtype), places)
            for key, places in deal.places.items()
        }

    def _returned(self, deal: Deal, stacks: Stacks) -> jax.Array:
        """The device's rows of the updates, from those of its matrices as of each of the stacks."""
        length = max(self.lengths[key] for key in stacks)
        rows: Any = None
        for i, (key, x) in enumerate(stacks.items()):
            x = padded(self._rows(key, x, deal.places[key]), length)
            own = jnp.asarray(deal.kinds)[device_index(self.axes)] == i
            rows = x if rows is None else jnp.where(own, x, rows)
        return along_ways(rows.reshape(-1, length), *deal.back)

    # Tables of what each device has and needs, `(devices, …)`.

    def _everywhere(self, table: np.ndarray) -> np.ndarray:
        """A table of all devices, from one that may be of a device that is like the others."""
        return np.tile(table, (self.layout.shares.devices // len(table), 1))

    def _pick(self, has: np.ndarray, wants: np.ndarray) -> Way:
        return Ways(self.mesh, has, wants).at_once()

    def _deal(self, places: dict[str, np.ndarray], owners: Mapping[str, Any]) -> Deal:
        """Of the matrices at some places of each stack, for its owners."""
        devices, each = next(iter(places.values())).shape
        kinds, wants = np.zeros(devices, int), np.full((devices, self.parts, each), -1)
        has, picks = [], {}
        for i, (key, own) in enumerate(owners.items()):
            kinds[[*own]] = i
            ids = self.begin[key] + places[key][[*own], None] * self.parts
            ids = ids + np.arange(self.parts)[:, None]
            wants[[*own]] = np.where(self.exist[ids], ids, -1)
            has.append(self._own(self.has[key], wants[[*own]]))
            picks[key] = self._pick(self.has[key], has[-1])
        has, wants = np.concatenate(has, 1), wants.reshape(devices, -1)
        spread = np.unique(wants[wants >= 0])
        spread = np.append(spread, np.full(-len(spread) % number(self.used), -1))
        spread = self._everywhere(spread.reshape(-1, number(self.used)).T)
        there = Ways.best(self.mesh, has, wants, spread)
        ids = self._own(has, wants)
        return Deal(places, kinds, picks, there, Ways.best(self.mesh, wants, ids, spread), ids)

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

    def _matrices(self, key: str, x: jax.Array, places: np.ndarray) -> jax.Array:
        """Matrices of a stack from rows of all devices, each assembled in its way."""
        matrices: Any = None
        tiles = functools.partial(self._tiles, key, places)
        for route, own in self._ways(key, places):
            new = route.matrices(x, tiles)
            matrices = new if matrices is None else jnp.where(own[:, None, None], new, matrices)
        return matrices

    def _rows(self, key: str, x: jax.Array, places: np.ndarray) -> jax.Array:
        """The inverse of `_matrices`: `(parts, k, length)`."""
        rows: Any = None
        tiles = functools.partial(self._tiles, key, places)
        for route, own in self._ways(key, places):
            new = route.rows_of_matrices(x, self.lengths[key], tiles)
            new = jnp.pad(new, ((0, self.parts - len(new)), (0, 0), (0, 0)))
            rows = new if rows is None else jnp.where(own[None, :, None], new, rows)
        return rows
