"""What devices exchange in a step: gradients go to the owners of matrices, and updates back.

Each device has a row of numbers of every matrix (`_routes.py`). Along the mesh axes that arrays
use, it sends each owner its rows of the owner's matrices, in one all-to-all for a stack. Arrays are
whole along other mesh axes, and nothing is sent there. So a device receives its own matrices, and
on the way back its own tiles of the updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._layout import StateLayout
from ._routes import Axes, Form, Route, device_entry, device_index, number, padded, regrouped
from ._shares import Round

Stacks = dict[str, jax.Array]


class ByOwner(NamedTuple):
    """Gradients, parameters or updates of some stacks, by who has them."""

    even: Any  # stacks: the matrices of the device
    # For each round and each of its stacks, one matrix per device. A device uses the one of its own
    # stack; the others are meaningless. In updates: one flat row per round.
    dealt: Any
    shared: Any  # stacks: the matrices that all devices share


class Exchange:
    """The way of the matrices of some arrays, inside a mapped axis."""

    def __init__(
        self,
        layout: StateLayout,
        forms: Mapping[str, tuple[Form, ...]],
        specs: Mapping[str, P],
        axes: Axes,
    ):
        routes = {
            key: [Route.of(form, specs[form.parameter]) for form in of_stack]
            for key, of_stack in forms.items()
        }
        every = [route for of_stack in routes.values() for route in of_stack]
        along = {a for route in every for a in route.inner}
        if any(route.outer for route in every):
            # Else devices with the same tiles would exchange the same parts along batches.
            along = {*axes}
        self.layout, self.shares = layout, layout.shares
        self.axes = tuple(a for a in axes if number([a]) > 1)
        self.used = tuple(a for a in self.axes if a in along)
        self.rest = tuple(a for a in self.axes if a not in along)
        self.routes = {k: [r._replace(used=self.used) for r in rs] for k, rs in routes.items()}
        self.lengths = {key: max(r.row_length for r in rs) for key, rs in self.routes.items()}
        self.first = {}  # for each matrix, the first of the routes that assemble alike
        for key, of_stack in self.routes.items():
            alike = [r.assembly for r in of_stack]
            firsts, counts = [*map(alike.index, alike)], [r.form.count for r in of_stack]
            self.first[key] = np.repeat(firsts, counts)

    def sent(self, arrays: Mapping[str, jax.Array]) -> ByOwner:
        """The device's matrices, from its tiles of arrays."""
        rows = {
            key: jnp.concatenate(
                [r.rows_of_tile(arrays[r.form.parameter], self.lengths[key]) for r in routes]
            )
            for key, routes in self.routes.items()
        }
        dealt, even, shared = [self._sent(r, rows) for r in self.shares.rounds], {}, {}
        for key, places in self._even().items():
            x = rows[key][: places.size].reshape(*places.shape, -1)
            even[key] = self._matrices(key, self._to_owners(x), places)
        for key, places in self._shared().items():
            x = rows[key][places[0] :]
            x = jax.lax.all_gather(x, self.used) if self.used else x[None]
            shared[key] = self._matrices(key, x, places)
        return ByOwner(even, dealt, shared)

    def returned(self, updates: ByOwner, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The device's tiles of updates, in the dtypes of arrays like these."""
        rows: dict[str, list[jax.Array]] = {key: [] for key in self.routes}
        for key, places in self._even().items():
            x = self._from_owners(self._rows(key, updates.even[key], places))
            rows[key].append(x.reshape(places.size, -1))
        for r, row in zip(self.shares.rounds, updates.dealt, strict=True):
            for key, x in self._returned(r, row).items():
                rows[key].append(x)
        for key, places in self._shared().items():
            x = self._rows(key, updates.shared[key], places)
            rows[key].append(device_entry(x, self.used))
        parts: dict[str, list[tuple[Route, jax.Array]]] = {}
        for key, routes in self.routes.items():
            ends = np.cumsum([route.form.count for route in routes])[:-1]
            for route, x in zip(routes, jnp.split(jnp.concatenate(rows[key]), ends), strict=True):
                parts.setdefault(route.form.parameter, []).append((route, route.part(x)))
        tiles = {}
        for name, of_array in parts.items():
            routes, xs = zip(*sorted(of_array, key=lambda part: part[0].form.start), strict=True)
            tiles[name] = routes[0].whole(xs).astype(like[name].dtype)
        return tiles

    def _sent(self, r: Round, rows: Stacks) -> Stacks:
        """The device's matrix of a round, as one of each of its stacks."""
        length = max(self.lengths[key] for key in r.owners)
        left = {key: rows[key][r.start[key] :][: len(owners)] for key, owners in r.owners.items()}
        places = np.zeros((self.shares.devices, 1), int)
        owners = sum(r.owners.values(), ())
        places[[*owners], 0] = np.arange(len(owners))
        x = jnp.concatenate([padded(x, length) for x in left.values()])
        x, stacks = self._to_owners(places, x), {}
        for key in r.owners:
            of_stack = x[..., : self.lengths[key]].astype(left[key].dtype)
            stacks[key] = self._matrices(key, of_stack, self._dealt(r, key))
        return stacks

    def _returned(self, r: Round, row: jax.Array) -> Stacks:
        """The device's rows of the updates of a round."""
        length = max(self.lengths[key] for key in r.owners)
        kind = jnp.asarray(r.kinds(self.shares.devices))[device_index(self.axes)]
        rows: Any = None
        for i, key in enumerate(r.owners):
            m, n = self.layout.stacks[key].shape[1:]
            x = self._rows(key, row[:, : m * n].reshape(-1, m, n), self._dealt(r, key))
            x = padded(x, length)
            rows = x if rows is None else jnp.where(kind == i, x, rows)
        rows = self._from_owners(rows)[:, 0]
        return {key: rows[np.array(own), : self.lengths[key]] for key, own in r.owners.items()}

    # The places in a stack of a device's matrices: (devices, k), or (k,) on all.

    def _even(self) -> dict[str, np.ndarray]:
        numbers = {key: n for key, n in self.shares.even.items() if n}
        return {key: np.arange(n).reshape(self.shares.devices, -1) for key, n in numbers.items()}

    def _dealt(self, r: Round, key: str) -> np.ndarray:
        return r.places(key, self.shares.devices)[:, None]

    def _shared(self) -> dict[str, np.ndarray]:
        even = self.shares.even
        return {key: np.arange(even[key], len(self.first[key])) for key in self.shares.shared}

    def _ways(self, key: str, places: np.ndarray) -> list[tuple[Route, Any]]:
        """The routes that make a stack's matrices differently, and which of the device's each."""
        first = self.first[key]
        ways, own = np.unique(first), first[places]
        if len(ways) > 1 and places.ndim == 2:
            own = jnp.asarray(own)[device_index(self.axes)]
        return [(self.routes[key][i], own == i) for i in ways]

    def _matrices(self, key: str, x: jax.Array, places: np.ndarray) -> jax.Array:
        """Matrices of a stack from rows of all devices, each assembled in its way."""
        matrices: Any = None
        for route, own in self._ways(key, places):
            new = route.matrices(x)
            matrices = new if matrices is None else jnp.where(own[:, None, None], new, matrices)
        return matrices

    def _rows(self, key: str, x: jax.Array, places: np.ndarray) -> jax.Array:
        """The inverse of `_matrices`: `(devices, k, length)`."""
        rows: Any = None
        for route, own in self._ways(key, places):
            new = route.rows_of_matrices(x, self.lengths[key])
            rows = new if rows is None else jnp.where(own[None, :, None], new, rows)
        return rows

    def _to_owners(self, x: Any, rows: Any = None) -> jax.Array:
        """Sends rows `x` by owner, or `rows` at these places, to the owners; rows by sender."""
        x = device_entry(regrouped(x, (self.axes,), (self.rest, self.used)), self.rest)
        x = x if rows is None else rows[x]
        return jax.lax.all_to_all(x, self.used, 0, 0) if self.used else x

    def _from_owners(self, x: jax.Array) -> jax.Array:
        x = jax.lax.all_to_all(x, self.used, 0, 0) if self.used else x
        x = jax.lax.all_gather(x, self.rest) if self.rest else x[None]
        return regrouped(x, (self.rest, self.used), (self.axes,))
