"""The work of one device: on its matrices of each stack, its matrix of each round, and on others.

It is done inside a mapped axis: of a `shard_map` (`OnMesh`), or of a caller's (`Within`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._validate import shown
from ._exchange import ByOwner, Exchange
from ._layout import DistributedState, StateLayout, split_axis
from ._meshes import along, explicit_sharding, is_explicit, resharded, sharded_like, travelled
from ._routes import Axes, Form, Stack, padded, travel_spec
from ._shares import Round


class Matrices(NamedTuple):
    """Arrays of matrices, before they are cut into stacks."""

    forms: Mapping[str, tuple[Form, ...]]  # of each stack
    arrays: dict[str, Any]  # by parameter

    @classmethod
    def of(cls, tree: Any) -> Matrices:
        """From stacks, unless they are such already."""
        if isinstance(tree, cls):
            return tree
        return cls({key: (Stack(key, x.shape),) for key, x in tree.items()}, dict(tree))

    @property
    def stacks(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the stacks, and the widest of the dtypes of each."""

        def stack(forms: tuple[Form, ...]) -> jax.ShapeDtypeStruct:
            dtype = jnp.result_type(*(self.arrays[form.parameter].dtype for form in forms))
            return jax.ShapeDtypeStruct((sum(f.count for f in forms), *forms[0].tile), dtype)

        return {key: stack(forms) for key, forms in self.forms.items()}


class Step(NamedTuple):
    """The work of one device, inside a mapped axis."""

    inner: Any
    restart: Callable[..., dict[str, Any]] | None  # of the damaged matrices of stacks
    layout: StateLayout
    axes: tuple[str, ...]
    extra_args: Mapping[str, Any]

    def exchanged(
        self, ways: Sequence[Exchange], state: DistributedState, *arrays: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        """The update of arrays, which go to the owners of their matrices on these ways."""
        sent = [way.sent(tiles) for way, tiles in zip(ways, arrays, strict=True)]
        updates, state = self.update(state, *sent)
        return ways[0].returned(updates, arrays[0]), state

    def update(
        self, state: DistributedState, gradients: ByOwner, params: ByOwner | None = None
    ) -> tuple[ByOwner, DistributedState]:
        """The device's updates, those of a round's matrix as a flat row, and its state."""
        common, even, dealt, split = {}, {}, [], {}
        updates = ByOwner({}, [], {})
        params = params or ByOwner({}, [{}] * len(gradients.dealt), {})
        parts = {key: (state.even[key], state.common[key]) for key in gradients.even}
        old = self._restarted(parts, gradients.even, params.even)
        for key, x in gradients.even.items():
            p = params.even.get(key)
            updates.even[key], new = self._direction(key, x, old[key], p)
            even[key], common[key] = self.layout.of[key].split.parts(new)
        for key, x in gradients.shared.items():
            p = params.shared.get(key)
            updates.shared[key], split[key], common[key] = self._shared(key, x, state, p)
        rounds = self.layout.shares.rounds
        for r, buffers, *arguments in zip(
            rounds, state.dealt, gradients.dealt, params.dealt, strict=True
        ):
            row, buffers = self._dealt(r, state.common, buffers, *arguments)
            updates.dealt.append(row)
            dealt.append(buffers)
        for key in [key for key in state.common if key not in common]:  # in order
            common[key] = self._counted(key, state.common[key], gradients, params)
        return updates, DistributedState(common, even, tuple(dealt), split)

    def _restarted(self, parts: Mapping[str, Any], gradients: Any, params: Any) -> dict[str, Any]:
        """The states of stacks, from both of their parts, with restarts of damaged matrices."""
        states = {key: self.layout.of[key].split.joined(*both) for key, both in parts.items()}
        if self.restart is None or not states:
            return states
        return self.restart(states, {key: params.get(key, gradients[key]) for key in states})

    def _direction(self, key: str, gradient: jax.Array, *arguments: Any, **more: Any) -> Any:
        """The update of some matrices of a stack, and their state."""
        update, new = self.inner.update(gradient, *arguments, **self.extra_args, **more)
        if update.shape != gradient.shape:
            raise ValueError(
                f"the direction of the matrices {key!r} must have the shape of their gradient, "
                f"{gradient.shape}; got {update.shape}."
            )
        return update, new

    def _dealt(self, r: Round, common: Any, buffers: Any, gradients: Any, params: Any) -> Any:
        """The update of the device's matrix of a round, and its state."""
        flat = {dtype: x[0] for dtype, x in buffers.items()}
        lengths = {dtype: x.size for dtype, x in flat.items()}
        size = max(math.prod(gradients[key].shape[1:]) for key in r.kinds)

        def work(key: str, buffers: Any) -> Any:
            parts = {key: (self.layout.of[key].unpacked(buffers), common[key])}
            state = self._restarted(parts, gradients, params)[key]
            update, new = self._direction(key, gradients[key], state, params.get(key))
            arrays, _ = self.layout.of[key].split.parts(new)
            row = padded(update.reshape(-1), size)
            return row, self.layout.of[key].packed(arrays, lengths)

        def alike(key: str, buffers: Any) -> Any:
            row, buffers = work(key, buffers)
            return row.astype(dtype), buffers

        dtype = jnp.result_type(
            *(jax.eval_shape(functools.partial(work, key), flat)[0] for key in r.kinds)
        )
        branches: list[Any] = [functools.partial(alike, key) for key in r.kinds]
        branches.append(lambda buffers: (jnp.zeros(size, dtype), buffers))
        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        row, flat = jax.lax.switch(kind, branches, flat)
        return row[None], {dtype: x[None] for dtype, x in flat.items()}

    def _shared(
        self, key: str, gradient: jax.Array, state: DistributedState, params: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The updates of matrices that all devices share, and the device's part of their state."""
        devices, layout = self.layout.shares.devices, self.layout.of[key]

        def gathered(x: jax.Array, like: Any) -> jax.Array:
            axis = split_axis(like.shape, devices)
            return x if axis is None else jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

        def own_part(x: jax.Array, like: Any) -> jax.Array:
            axis = split_axis(like.shape, devices)
            if axis is None:
                return x
            size = x.shape[axis] // devices
            start = jax.lax.axis_index(self.axes) * size
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        parts = {key: (jax.tree.map(gathered, state.split[key], layout.matrix), state.common[key])}
        by_key = {} if params is None else {key: params}
        whole = self._restarted(parts, {key: gradient}, by_key)[key]
        update, new = self._direction(key, gradient, whole, params, shared_axis=self.axes)
        arrays, common = layout.split.parts(new)
        return update, jax.tree.map(own_part, arrays, layout.matrix), common

    def _counted(self, key: str, common: Any, gradients: ByOwner, params: ByOwner) -> Any:
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
    """Over the devices of a mesh."""

    mesh: Mesh
    axes: Axes
    lie: Mapping[str, P] = dataclasses.field(default_factory=dict)  # how arrays do, if it was said
    holders = 1  # into how many parts a state is divided that `update` gets

    @property
    def known(self) -> bool:
        """Whether it is known how arrays lie: types say it on Explicit axes."""
        return is_explicit(self.mesh) or bool(self.lie)

    @functools.cached_property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def spec(self, form: Form, x: jax.Array) -> P:
        """How an array lies along the axes or, where that is not known, how it is to lie."""
        if self.lie:
            if form.parameter not in self.lie:
                raise ValueError(
                    f"mesh: the shardings have none for {form.parameter!r}, only for "
                    f"{shown([*self.lie])}; give those of the parameters."
                )
            return along(self.lie[form.parameter], self.axes)
        if not is_explicit(self.mesh):
            return travel_spec(form, self.mesh, self.axes)
        sharding = explicit_sharding(x)
        return P() if sharding is None else along(sharding.spec, self.axes)

    def placed(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        return jax.tree.map(
            lambda x, spec: resharded(x, self.mesh, spec), state, layout.specs(self.axes)
        )

    started = placed  # from a whole state

    def travelled(self, x: jax.Array, spec: P) -> jax.Array:
        return (resharded if self.known else travelled)(x, self.mesh, spec)

    def run(
        self, step: Step, state: DistributedState, gradients: Matrices, *params: Matrices
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        specs, trees = step.layout.specs(self.axes), (gradients, *params)
        lie = [
            {
                form.parameter: self.spec(form, tree.arrays[form.parameter])
                for forms in tree.forms.values()
                for form in forms
            }
            for tree in trees
        ]
        ways = [
            Exchange(step.layout, tree.forms, by_name, self.axes, self.mesh.shape)
            for tree, by_name in zip(trees, lie, strict=True)
        ]
        work = jax.shard_map(
            functools.partial(step.exchanged, ways),
            mesh=self.mesh,
            in_specs=(specs, *lie),
            out_specs=(lie[0], specs),
            check_vma=False,
        )
        arrays = [
            {n: self.travelled(tree.arrays[n], spec) for n, spec in by_name.items()}
            for tree, by_name in zip(trees, lie, strict=True)
        ]
        updates, state = work(self.placed(state, step.layout), *arrays)
        return {n: sharded_like(x, gradients.arrays[n]) for n, x in updates.items()}, state


@dataclasses.dataclass(frozen=True)
class Within:
    """Inside a mapped function, on one device's arrays, which all devices have alike."""

    axes: Axes
    known = True

    @property
    def devices(self) -> int:
        """The number of devices."""
        try:
            return jax.lax.axis_size(self.axes)
        except NameError as error:
            raise ValueError(
                f"axis_name (mesh_axis): {', '.join(map(repr, self.axes))} is not an axis of an "
                "enclosing pmap or shard_map; call init and update inside one, or give mesh=."
            ) from error

    @property
    def holders(self) -> int:
        return self.devices

    def started(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        def device_part(x: jax.Array) -> jax.Array:
            size = x.shape[0] // self.devices
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axes) * size, size)

        even, dealt = jax.tree.map(device_part, (state.even, state.dealt))
        return state._replace(even=even, dealt=dealt)

    def run(
        self, step: Step, state: DistributedState, gradients: Matrices, *params: Matrices
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        sizes = {a: jax.lax.axis_size(a) for a in self.axes}
        ways = [
            Exchange(step.layout, m.forms, dict.fromkeys(m.arrays, P()), self.axes, sizes)
            for m in (gradients, *params)
        ]
        return step.exchanged(ways, state, gradients.arrays, *(m.arrays for m in params))
