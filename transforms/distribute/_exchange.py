"""What devices exchange in a step: gradients go to the owners of matrices, and updates back.

Each device has a row of numbers of every matrix (`_routes.py`). Along the mesh axes that arrays
use, it sends each owner its rows of the owner's matrices, in one all-to-all for a stack. Arrays are
whole along other mesh axes, and nothing is sent there. So a device receives its own matrices, and
on the way back its own tiles of the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._layout import StateLayout
from ._routes import Axes, Form, Route, device_entry, padded, regrouped
from ._shares import Round, Stacks


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
        sizes: Mapping[str, int],
    ):
        routes = {
            key: [Route.of(form, specs[form.parameter], sizes) for form in of_stack]
            for key, of_stack in forms.items()
        }
        along = {a for of_stack in routes.values() for r in of_stack for a in r.inner + r.outer}
        self.layout, self.sizes = layout, sizes
        self.axes = tuple(a for a in axes if sizes[a] > 1)
        self.used = tuple(a for a in self.axes if a in along)
        self.rest = tuple(a for a in self.axes if a not in along)
        self.routes, self.kinds, self.kind_of = {}, {}, {}
        for key, of_stack in routes.items():
            self.routes[key] = [dataclasses.replace(r, used=self.used) for r in of_stack]
            kinds = {route.assembly: route for route in self.routes[key]}
            places = [list(kinds).index(route.assembly) for route in self.routes[key]]
            self.kinds[key] = [*kinds.values()]
            self.kind_of[key] = np.repeat(places, [route.form.count for route in of_stack])
        self.lengths = {key: max(r.row_length for r in rs) for key, rs in self.routes.items()}

    def sent(self, arrays: Mapping[str, jax.Array]) -> ByOwner:
        """The device's matrices, from its tiles of arrays."""
        rows = {
            key: jnp.concatenate(
                [r.rows_of_tile(arrays[r.form.parameter], self.lengths[key]) for r in routes]
            )
            for key, routes in self.routes.items()
        }
        even, left, shared = self.layout.shares.split_stacks(rows)
        rounds = [self._sent(r, left) for r in self.layout.shares.rounds]
        for key, x in even.items():
            x = self._to_owners(x.reshape(self.layout.shares.devices, -1, x.shape[-1]))
            even[key] = self._matrices(key, x, self._kinds(key, self._even(key)))
        for key, x in shared.items():
            x = jax.lax.all_gather(x, self.used) if self.used else x[None]
            shared[key] = self._matrices(key, x, self.kind_of[key][-x.shape[1] :])
        return ByOwner(even, rounds, shared)

    def returned(self, updates: ByOwner, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The device's tiles of updates, in the dtypes of arrays like these."""
        parts = {key: [] for key in self.routes}
        for key, x in updates.even.items():
            x = self._rows(key, self._narrow(key, x, like), self._kinds(key, self._even(key)))
            parts[key].append(self._from_owners(x).reshape(-1, x.shape[-1]))
        for r, row in zip(self.layout.shares.rounds, updates.dealt, strict=True):
            for key, x in self._returned(r, row, like).items():
                parts[key].append(x)
        for key, x in updates.shared.items():
            x = self._rows(key, self._narrow(key, x, like), self.kind_of[key][-len(x) :])
            parts[key].append(device_entry(x, self.used))
        arrays: dict[str, list[tuple[Route, jax.Array]]] = {}
        for key, routes in self.routes.items():
            ends = np.cumsum([route.form.count for route in routes])[:-1]
            for route, x in zip(routes, jnp.split(jnp.concatenate(parts[key]), ends), strict=True):
                arrays.setdefault(route.form.parameter, []).append((route, route.part(x)))
        return {name: _tile(parts).astype(like[name].dtype) for name, parts in arrays.items()}

    def _sent(self, r: Round, left: Stacks) -> Stacks:
        """The device's matrix of a round, as one of each of its stacks."""
        length = max(self.lengths[key] for key in r.kinds)
        rows = jnp.concatenate([padded(left[key], length) for key in r.kinds])
        starts = np.cumsum([0, *(len(left[key]) for key in r.kinds)])[: len(r.kinds)]
        places = np.append(starts, 0)[[*r.kind]] + r.entry
        x = self._to_owners(places[:, None], rows)
        stacks = {}
        for key in r.kinds:
            of_stack = x[..., : self.lengths[key]].astype(left[key].dtype)
            stacks[key] = self._matrices(key, of_stack, self._kinds(key, self._dealt(r, key)))
        return stacks

    def _returned(self, r: Round, row: jax.Array, like: Any) -> Stacks:
        """The device's rows of the updates of a round."""
        length = max(self.lengths[key] for key in r.kinds)
        dtypes = [self._narrow(key, row, like).dtype for key in r.kinds]
        row = row.astype(jnp.result_type(*dtypes))
        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        rows: Any = None
        for i, key in enumerate(r.kinds):
            x = self.layout.matrices(row, key)
            x = padded(self._rows(key, x, self._kinds(key, self._dealt(r, key))), length)
            rows = x if rows is None else jnp.where(kind == i, x, rows)
        rows = self._from_owners(rows)[:, 0]
        return {key: rows[np.array(r.owners(key)), : self.lengths[key]] for key in r.kinds}

    def _narrow(self, key: str, x: jax.Array, like: Mapping[str, jax.Array]) -> jax.Array:
        """Updates in the dtype of their gradients, if it has fewer bits."""
        dtype = jnp.result_type(*(like[route.form.parameter] for route in self.routes[key]))
        return x.astype(dtype) if dtype.itemsize < x.dtype.itemsize else x

    def _even(self, key: str) -> np.ndarray:
        """Which matrices of an evenly divided stack each device has."""
        return np.arange(self.layout.shares.even[key]).reshape(self.layout.shares.devices, -1)

    def _dealt(self, r: Round, key: str) -> np.ndarray:
        """Which matrix of a stack each device has in a round."""
        return self.layout.shares.even[key] + np.array(r.entries(key, 0))[:, None]

    def _kinds(self, key: str, places: np.ndarray) -> Any:
        """How the device's matrices are assembled, from those that each device has."""
        kinds = self.kind_of[key][places]
        one = len(self.kinds[key]) == 1
        return kinds[0] if one else jnp.asarray(kinds)[jax.lax.axis_index(self.axes)]

    def _matrices(self, key: str, x: jax.Array, kinds: Any) -> jax.Array:
        """Matrices of a stack from rows of all devices, each assembled in its way."""
        first, *others = self.kinds[key]
        matrices = first.matrices(x)
        for i, route in enumerate(others, 1):
            matrices = jnp.where((kinds == i)[:, None, None], route.matrices(x), matrices)
        return matrices

    def _rows(self, key: str, x: jax.Array, kinds: Any) -> jax.Array:
        """The inverse of `_matrices`: `(devices, k, length)`."""
        first, *others = self.kinds[key]
        rows = first.rows_of_matrices(x, self.lengths[key])
        for i, route in enumerate(others, 1):
            other = route.rows_of_matrices(x, self.lengths[key])
            rows = jnp.where((kinds == i)[None, :, None], other, rows)
        return rows

    def _to_owners(self, x: Any, rows: Any = None) -> jax.Array:
        """Sends rows `x` by owner, or `rows` at these places, to the owners; rows by sender."""
        x = regrouped(x, (self.axes,), (self.rest, self.used), self.sizes)
        x = device_entry(jnp.asarray(x), self.rest) if self.rest else x[0]
        x = x if rows is None else rows[x]
        return jax.lax.all_to_all(x, self.used, 0, 0) if self.used else x

    def _from_owners(self, x: jax.Array) -> jax.Array:
        x = jax.lax.all_to_all(x, self.used, 0, 0) if self.used else x
        x = jax.lax.all_gather(x, self.rest) if self.rest else x[None]
        return regrouped(x, (self.rest, self.used), (self.axes,), self.sizes)


def _tile(parts: Sequence[tuple[Route, jax.Array]]) -> jax.Array:
    """The device's tile of an array from its forms' parts."""
    routes, arrays = zip(*sorted(parts, key=lambda part: part[0].form.start), strict=True)
    return routes[0].whole(arrays)
