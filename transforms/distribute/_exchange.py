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
from ._routes import Axes, Form, Route, number, padded
from ._shares import Round, Stacks


class Given(NamedTuple):
    """Gradients, parameters or updates of some stacks, by who has them."""

    even: Any  # stacks: the matrices of the device
    # Per round, a matrix of each of its stacks. The device works on that of its own kind alone; the
    # others are no matrices. Updates have only this one, as a flat row.
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
        """From the forms of each stack, how their arrays lie, and the sizes of mesh axes."""
        routes = {
            key: [Route.of(form, specs[form.parameter], sizes) for form in own]
            for key, own in forms.items()
        }
        every = [route for own in routes.values() for route in own]
        self.layout, self.axes, self.sizes = layout, axes, sizes
        self.used = tuple(a for a in axes if any(a in r.inner + r.outer for r in every))
        self.rest = tuple(a for a in axes if a not in self.used)
        self.routes, self.kinds, self.kind_of = {}, {}, {}
        for key, own in routes.items():
            own = [route.travelling(self.used) for route in own]
            length = max(route.length for route in own)
            own = [dataclasses.replace(route, length=length) for route in own]
            kinds = {route.assembly: route for route in own}
            places = [list(kinds).index(route.assembly) for route in own]
            self.routes[key], self.kinds[key] = own, [*kinds.values()]
            self.kind_of[key] = np.repeat(places, [route.form.count for route in own])

    def sent(self, arrays: Mapping[str, jax.Array]) -> Given:
        """The device's matrices, from its tiles of arrays."""
        rows = {
            key: jnp.concatenate([route.rows(arrays[route.form.parameter]) for route in own])
            for key, own in self.routes.items()
        }
        even, left, shared = self.layout.shares.parts(rows)
        rounds = [self._sent(r, left) for r in self.layout.shares.rounds]
        devices = number(self.axes, self.sizes)
        for key, x in even.items():
            x = self._to_owners(self._own(x.reshape(devices, -1, x.shape[-1])))
            even[key] = self._matrices(key, x, self._even_kinds(key, devices))
        for key, x in shared.items():
            x = jax.lax.all_gather(x, self.used) if self.used else x[None]
            shared[key] = self._matrices(key, x, self.kind_of[key][-x.shape[1] :])
        return Given(even, rounds, shared)

    def returned(self, found: Given, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The device's tiles of updates, in the dtypes of arrays like these."""
        devices, parts = number(self.axes, self.sizes), {key: [] for key in self.routes}
        for key, x in found.even.items():
            x = self._rows(key, self._narrow(key, x, like), self._even_kinds(key, devices))
            parts[key].append(self._from_owners(x).reshape(-1, x.shape[-1]))
        for r, row in zip(self.layout.shares.rounds, found.dealt, strict=True):
            for key, x in self._returned(r, row, like).items():
                parts[key].append(x)
        for key, x in found.shared.items():
            x = self._rows(key, self._narrow(key, x, like), self.kind_of[key][-len(x) :])
            own = jax.lax.axis_index(self.used) if self.used else 0
            parts[key].append(jax.lax.dynamic_index_in_dim(x, own, keepdims=False))
        arrays: dict[str, list[tuple[Route, jax.Array]]] = {}
        for key, own in self.routes.items():
            ends = np.cumsum([route.form.count for route in own])[:-1]
            for route, x in zip(own, jnp.split(jnp.concatenate(parts[key]), ends), strict=True):
                arrays.setdefault(route.form.parameter, []).append((route, route.array(x)))
        return {name: _whole(own).astype(like[name].dtype) for name, own in arrays.items()}

    def _sent(self, r: Round, left: Stacks) -> Stacks:
        """The device's matrix of a round, as one of each of its stacks."""
        length = max(left[key].shape[-1] for key in r.kinds)
        rows = jnp.concatenate([padded(left[key], length) for key in r.kinds])
        starts = np.cumsum([0, *(len(left[key]) for key in r.kinds)])[: len(r.kinds)]
        places = np.append(starts, 0)[[*r.kind]] + r.entry
        x = self._to_owners(rows[self._own(places[:, None])])
        found = {}
        for key in r.kinds:
            own = x[..., : left[key].shape[-1]].astype(left[key].dtype)
            found[key] = self._matrices(key, own, self._dealt_kinds(r, key))
        return found

    def _returned(self, r: Round, row: jax.Array, like: Any) -> Stacks:
        """The device's rows of the updates of a round."""
        length = max(self.kinds[key][0].length for key in r.kinds)
        dtypes = [self._narrow(key, row, like).dtype for key in r.kinds]
        row = row.astype(jnp.result_type(*dtypes))
        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        found: Any = None
        for i, key in enumerate(r.kinds):
            x = self._rows(key, self.layout.matrices(row, key), self._dealt_kinds(r, key))
            x = padded(x, length)
            found = x if found is None else jnp.where(kind == i, x, found)
        rows = self._from_owners(found)[:, 0]
        lengths = {key: self.kinds[key][0].length for key in r.kinds}
        return {key: rows[np.array(r.owners(key)), : lengths[key]] for key in r.kinds}

    def _narrow(self, key: str, x: jax.Array, like: Mapping[str, jax.Array]) -> jax.Array:
        """Updates in the dtype of their gradients, if it has fewer bits."""
        dtype = jnp.result_type(*(like[route.form.parameter] for route in self.routes[key]))
        return x.astype(dtype) if dtype.itemsize < x.dtype.itemsize else x

    def _even_kinds(self, key: str, devices: int) -> Any:
        kinds = self.kind_of[key][: self.layout.shares.even[key]].reshape(devices, -1)
        return self._at_owner(key, kinds)

    def _dealt_kinds(self, r: Round, key: str) -> Any:
        places = self.layout.shares.even[key] + np.array(r.entries(key, 0))
        return self._at_owner(key, self.kind_of[key][places][:, None])

    def _at_owner(self, key: str, kinds: np.ndarray) -> Any:
        """How the device's matrices are assembled, from a table with a row per device."""
        one = len(self.kinds[key]) == 1
        return kinds[0] if one else jnp.asarray(kinds)[jax.lax.axis_index(self.axes)]

    def _matrices(self, key: str, x: jax.Array, kinds: Any) -> jax.Array:
        """Matrices of a stack from rows of all devices, each assembled in its way."""
        first, *others = self.kinds[key]
        found = first.matrices(x)
        for i, route in enumerate(others, 1):
            found = jnp.where((kinds == i)[:, None, None], route.matrices(x), found)
        return found

    def _rows(self, key: str, x: jax.Array, kinds: Any) -> jax.Array:
        """The inverse of `_matrices`: `(devices, k, length)`."""
        first, *others = self.kinds[key]
        found = first.parts(x)
        for i, route in enumerate(others, 1):
            found = jnp.where((kinds == i)[None, :, None], route.parts(x), found)
        return found

    def _own(self, x: Any) -> Any:
        """Of an array with an entry per owner, those that this device sends to."""
        x = x.reshape(*(self.sizes[a] for a in self.axes), *x.shape[1:])
        order = [self.axes.index(a) for a in (*self.rest, *self.used)]
        x = x.transpose(*order, *range(len(order), x.ndim))
        x = x.reshape(
            number(self.rest, self.sizes), number(self.used, self.sizes), *x.shape[len(order) :]
        )
        if not self.rest:
            return x[0]
        own = jax.lax.axis_index(self.rest)
        return jax.lax.dynamic_index_in_dim(jnp.asarray(x), own, keepdims=False)

    def _to_owners(self, x: jax.Array) -> jax.Array:
        """Of rows by owner, those that others send: rows by sender."""
        return jax.lax.all_to_all(x, self.used, 0, 0) if self.used else x

    def _from_owners(self, x: jax.Array) -> jax.Array:
        """The inverse of `_to_owners` and `_own`: rows by owner."""
        x = self._to_owners(x)
        if not self.rest:
            return x
        x = jax.lax.all_gather(x, self.rest)
        order = (*self.rest, *self.used)
        x = x.reshape(*(self.sizes[a] for a in order), *x.shape[2:])
        x = x.transpose(*(order.index(a) for a in self.axes), *range(len(order), x.ndim))
        return x.reshape(number(self.axes, self.sizes), *x.shape[len(order) :])


def _whole(parts: Sequence[tuple[Route, jax.Array]]) -> jax.Array:
    """The device's tile of an array from its forms' parts."""
    parts = sorted(parts, key=lambda part: part[0].form.start)
    route, x = parts[0]
    if len(parts) > 1:
        x = jnp.concatenate([x for _, x in parts], axis=-1)
    return route.whole(x)
