"""The work of one device, and the way of matrices to their owners and back.

A device works on its matrices of each stack, on its matrix of each round, and on parts of others
(`Step`). It does so inside a mapped axis: of a `shard_map` (`OnMesh`), or of a caller's (`Within`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._layout import DistributedState, StateLayout, split_axis
from ._meshes import explicit_sharding, is_explicit, resharded, sharded_like, taken, travel_spec
from ._shares import Round, Stacks


class Given(NamedTuple):
    """Gradients, parameters or updates of some stacks, by who has them."""

    even: Any  # stacks: the matrices of the device
    # Per round, a matrix of each of its stacks. The device works on that of its own kind alone; the
    # others fill up. Updates have only this one, as a flat row.
    dealt: Any
    shared: Any  # stacks: the matrices that all devices share


class Step(NamedTuple):
    """The work of one device, inside a mapped axis."""

    inner: Any
    restart: Callable[..., dict[str, Any]] | None  # of the damaged matrices of stacks
    layout: StateLayout
    axes: tuple[str, ...]
    extra_args: Mapping[str, Any]

    def update(
        self, state: DistributedState, gradients: Given, params: Given | None = None
    ) -> tuple[Given, DistributedState]:
        """The device's updates, those of a round's matrix as a flat row, and its state."""
        common, even, dealt, split = {}, {}, [], {}
        found = Given({}, [], {})
        params = params or Given({}, [{}] * len(gradients.dealt), {})
        own = {key: (state.even[key], state.common[key]) for key in gradients.even}
        old = self._restarted(own, gradients.even, params.even)
        for key, x in gradients.even.items():
            given = x, old[key], params.even.get(key)
            found.even[key], new = self.inner.update(*given, **self.extra_args)
            even[key], common[key] = self.layout.of[key].split.parts(new)
        for key, x in gradients.shared.items():
            p = params.shared.get(key)
            found.shared[key], split[key], common[key] = self._shared(key, x, state, p)
        rounds = self.layout.shares.rounds
        for r, buffers, *given in zip(
            rounds, state.dealt, gradients.dealt, params.dealt, strict=True
        ):
            row, buffers = self._dealt(r, state.common, buffers, *given)
            found.dealt.append(row)
            dealt.append(buffers)
        for key in state.common.keys() - common.keys():
            common[key] = self._counted(key, state.common[key], gradients, params)
        return found, DistributedState(common, even, tuple(dealt), split)

    def _restarted(self, parts: Mapping[str, Any], gradients: Any, params: Any) -> dict[str, Any]:
        """The states of stacks, from both of their parts, with restarts of damaged matrices."""
        states = {key: self.layout.of[key].split.joined(*own) for key, own in parts.items()}
        if self.restart is None or not states:
            return states
        return self.restart(states, {key: params.get(key, gradients[key]) for key in states})

    def _dealt(self, r: Round, common: Any, buffers: Any, gradients: Any, params: Any) -> Any:
        """The update of the device's matrix of a round, and its state."""
        own = {dtype: x[0] for dtype, x in buffers.items()}
        lengths = {dtype: x.size for dtype, x in own.items()}
        size = max(math.prod(gradients[key].shape[1:]) for key in r.kinds)
        row_dtype = jnp.result_type(*(gradients[key] for key in r.kinds))

        def work(key: str, own: Any) -> Any:
            parts = {key: (self.layout.of[key].unpacked(own), common[key])}
            state = self._restarted(parts, gradients, params)[key]
            given = gradients[key], state, params.get(key)
            update, new = self.inner.update(*given, **self.extra_args)
            arrays, _ = self.layout.of[key].split.parts(new)
            row = update.astype(row_dtype).reshape(-1)
            return jnp.pad(row, (0, size - row.size)), self.layout.of[key].packed(arrays, lengths)

        branches: list[Any] = [functools.partial(work, key) for key in r.kinds]
        branches.append(lambda own: (jnp.zeros(size, row_dtype), own))
        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        row, own = jax.lax.switch(kind, branches, own)
        return row[None], {dtype: x[None] for dtype, x in own.items()}

    def _shared(
        self, key: str, gradient: jax.Array, state: DistributedState, params: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The updates of matrices that all devices share, and the device's part of their state."""
        devices, layout = self.layout.shares.devices, self.layout.of[key]

        def gathered(x: jax.Array, like: Any) -> jax.Array:
            axis = split_axis(like.shape, devices)
            return x if axis is None else jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

        def part(x: jax.Array, like: Any) -> jax.Array:
            axis = split_axis(like.shape, devices)
            if axis is None:
                return x
            size = x.shape[axis] // devices
            start = jax.lax.axis_index(self.axes) * size
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        parts = {key: (jax.tree.map(gathered, state.split[key], layout.matrix), state.common[key])}
        given = {} if params is None else {key: params}
        own = self._restarted(parts, {key: gradient}, given)[key]
        more = {**self.extra_args, "shared_axis": self.axes}
        update, new = self.inner.update(gradient, own, params, **more)
        arrays, common = layout.split.parts(new)
        return update, jax.tree.map(part, arrays, layout.matrix), common

    def _counted(self, key: str, common: Any, gradients: Given, params: Given) -> Any:
        """Counts a step of a stack that has only dealt-out matrices: arrays that all devices have.

        They do not depend on the matrices, so XLA leaves out the rest of this update.
        """
        i = next(i for i, r in enumerate(self.layout.shares.rounds) if key in r.kinds)
        layout = self.layout.of[key]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.matrix)
        state, p = layout.split.joined(zeros, common), params.dealt[i].get(key)
        _, new = self.inner.update(gradients.dealt[i][key], state, p, **self.extra_args)
        return layout.split.parts(new)[1]


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Over the devices of a mesh.

    Matrices travel in one sharding (`spec`). From there a device takes its own part of a stack, and
    its own matrices of a round.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    holders = 1  # into how many parts a state is divided that `update` gets

    @functools.cached_property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def spec(self, stack: jax.Array) -> P:
        """Evenly over all devices (`travel_spec`), or on a mesh with Explicit axes as they come."""
        if not is_explicit(self.mesh):
            return travel_spec(stack.shape, self.mesh, self.axes)
        sharding = explicit_sharding(stack)
        return P() if sharding is None else P(None, *sharding.spec[1:])

    def placed(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        """The state, with each array where it belongs."""
        return jax.tree.map(
            lambda x, spec: resharded(x, self.mesh, spec), state, layout.specs(self.axes)
        )

    started = placed  # from a whole state

    def sent(self, layout: StateLayout, stacks: Stacks) -> Given:
        """The matrices, with their owners."""
        mesh, own = self.mesh, P(self.axes)
        specs = {key: self.spec(x) for key, x in stacks.items()}
        even, left, shared = layout.shares.parts(stacks)
        even, left = (
            {k: resharded(x, mesh, specs[k]) for k, x in part.items()} for part in (even, left)
        )
        rounds = []
        for r in layout.shares.rounds:  # zeros for devices that get another kind
            found = {k: taken(left[k], r.entries(k, len(left[k])), mesh, specs[k]) for k in r.kinds}
            rounds.append({k: resharded(x, mesh, own) for k, x in found.items()})
        return Given(
            {k: resharded(x, mesh, own) for k, x in even.items()},
            rounds,
            {k: resharded(x, mesh, P()) for k, x in shared.items()},
        )

    def mapped(self, step: Callable[..., Any], layout: StateLayout, number: int) -> Any:
        """`step(state, *given)` on each device, for so many `given`."""
        specs, given = layout.specs(self.axes), Given(P(self.axes), P(self.axes), P())
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(specs, *[given] * number),
            out_specs=(given, specs),
            check_vma=False,
        )

    def returned(self, layout: StateLayout, like: Stacks, found: Given) -> Stacks:
        """Updates from their owners, as stacks like `like`."""
        specs = {key: self.spec(x) for key, x in like.items()}
        even = {key: resharded(x, self.mesh, specs[key]) for key, x in found.even.items()}
        rounds = []
        for r, row in zip(layout.shares.rounds, found.dealt, strict=True):
            rounds.append({})
            for key in r.kinds:
                x = layout.matrices(row, key)
                x = resharded(x, self.mesh, specs[key]) if any(specs[key]) else x
                rounds[-1][key] = taken(x, r.owners(key), self.mesh, specs[key])
        return layout.shares.joined(like, even, rounds, found.shared, sharded_like)


@dataclasses.dataclass(frozen=True)
class Within:
    """Inside a mapped function, on one device's arrays, which all devices have alike."""

    axes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """The number of devices.

        Raises:
          ValueError: outside of such a function.
        """
        try:
            return jax.lax.axis_size(self.axes)
        except NameError as error:
            raise ValueError(
                f"axis_name: {', '.join(map(repr, self.axes))} is not an axis of an enclosing pmap "
                "or shard_map; call init and update inside one, or give mesh=."
            ) from error

    @property
    def holders(self) -> int:
        """Each device has a part of the state."""
        return self.devices

    def _own(self, x: jax.Array) -> jax.Array:
        size = x.shape[0] // self.devices
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size)

    def placed(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        """The state, which is the device's part."""
        del layout
        return state

    def started(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        """The device's part of a whole state."""
        del layout
        even, dealt = jax.tree.map(self._own, (state.even, state.dealt))
        return state._replace(even=even, dealt=dealt)

    def sent(self, layout: StateLayout, stacks: Stacks) -> Given:
        """The device's matrices."""
        even, left, _ = layout.shares.parts(stacks)
        index = jax.lax.axis_index(self.axes)
        rounds = []
        for r in layout.shares.rounds:
            own = {key: jnp.array(r.entries(key, 0))[index] for key in r.kinds}
            rounds.append({k: jax.lax.dynamic_index_in_dim(left[k], i) for k, i in own.items()})
        return Given(jax.tree.map(self._own, even), rounds, {})

    def mapped(self, step: Callable[..., Any], layout: StateLayout, number: int) -> Any:
        """`step`, which runs on each device already."""
        del layout, number
        return step

    def returned(self, layout: StateLayout, like: Stacks, found: Given) -> Stacks:
        """The updates of all devices, as stacks like `like`."""
        even, rows = jax.tree.map(
            lambda x: jax.lax.all_gather(x, self.axes, tiled=True), (found.even, found.dealt)
        )
        rounds = [
            {key: layout.matrices(row, key)[jnp.array(r.owners(key))] for key in r.kinds}
            for r, row in zip(layout.shares.rounds, rows, strict=True)
        ]
        return layout.shares.joined(like, even, rounds, {}, lambda x, _: x)
