"""The work of one device: on its matrices of each stack, its matrix of each round, and on others.

It is done inside a mapped axis: of a `shard_map` (`OnMesh`), or of a caller's (`Within`).
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

from .._validate import shown
from . import _meshes
from ._exchange import ByOwner, Exchange
from ._layout import DistributedState, StateLayout, split_axis
from ._routes import Axes, Form, Stack, device_index, device_part, padded, travel_spec
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
        self,
        forms: Mapping[str, tuple[Form, ...]],
        specs: Mapping[str, P],
        state: DistributedState,
        *arrays: dict[str, jax.Array],
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        """The update of gradients (and parameters), which go to the owners of their matrices."""
        way = Exchange(self.layout, forms, specs, self.axes)
        updates, state = self.update(state, *map(way.sent, arrays))
        return way.returned(updates, arrays[0]), state

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
            updates.even[key], even[key], common[key] = self._direction(
                key, x, old[key], params.even.get(key)
            )
        for key, x in gradients.shared.items():
            updates.shared[key], split[key], common[key] = self._shared(
                key, x, state, params.shared.get(key)
            )
        for r, *arguments in zip(
            self.layout.shares.rounds, state.dealt, gradients.dealt, params.dealt, strict=True
        ):
            row, buffers = self._dealt(r, state.common, *arguments)
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

    def _direction(
        self, key: str, gradient: jax.Array, state: Any, params: Any, **more: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The update of some matrices of a stack, and both parts of their state.

        The update is in the gradient's dtype if that has fewer bits.
        """
        update, new = self.inner.update(gradient, state, params, **self.extra_args, **more)
        if update.shape != gradient.shape:
            raise ValueError(
                f"the direction of the matrices {key!r} must have the shape of their gradient, "
                f"{gradient.shape}; got {update.shape}."
            )
        narrow = min(update.dtype, gradient.dtype, key=lambda dtype: dtype.itemsize)
        return update.astype(narrow), *self.layout.of[key].split.parts(new)

    def _dealt(self, r: Round, common: Any, buffers: Any, gradients: Any, params: Any) -> Any:
        """The update of the device's matrix of a round, and its state."""
        flat = {dtype: x[0] for dtype, x in buffers.items()}
        lengths = {dtype: x.size for dtype, x in flat.items()}
        size = max(gradients[key].size for key in r.owners)

        def work(key: str, buffers: Any) -> Any:
            parts = {key: (self.layout.of[key].unpacked(buffers), common[key])}
            state = self._restarted(parts, gradients, params)[key]
            update, arrays, _ = self._direction(key, gradients[key], state, params.get(key))
            return padded(update.reshape(-1), size), self.layout.of[key].packed(arrays, lengths)

        works: list[Any] = [functools.partial(work, key) for key in r.owners]
        dtype = jnp.result_type(*(jax.eval_shape(work, flat)[0] for work in works))
        works.append(lambda buffers: (jnp.zeros(size, dtype), buffers))

        def alike(work: Any, buffers: Any) -> Any:
            row, buffers = work(buffers)
            return row.astype(dtype), buffers

        kind = jnp.asarray(r.kinds(self.layout.shares.devices))[device_index(self.axes)]
        branches = [functools.partial(alike, work) for work in works]
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
            return x if axis is None else device_part(x, self.axes, axis)

        parts = {key: (jax.tree.map(gathered, state.split[key], layout.matrix), state.common[key])}
        by_key = {} if params is None else {key: params}
        whole = self._restarted(parts, {key: gradient}, by_key)[key]
        update, arrays, common = self._direction(
            key, gradient, whole, params, shared_axis=self.axes
        )
        return update, jax.tree.map(own_part, arrays, layout.matrix), common

    def _counted(self, key: str, common: Any, gradients: ByOwner, params: ByOwner) -> Any:
        """Counts a step of a stack that has only dealt-out matrices: arrays that all devices have.

        They do not depend on the matrices, so XLA leaves out the rest of this update.
        """
        i = next(i for i, r in enumerate(self.layout.shares.rounds) if key in r.owners)
        layout = self.layout.of[key]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.matrix)
        state, p = layout.split.joined(zeros, common), params.dealt[i].get(key)
        return self._direction(key, gradients.dealt[i][key], state, p)[2]


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Over the devices of a mesh."""

    mesh: Mesh
    axes: Axes
    lie: Mapping[str, P] = dataclasses.field(default_factory=dict)  # how arrays do, if it was said
    holders = 1  # into how many parts a state is divided that `update` gets

    @functools.cached_property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes)

    @property
    def known(self) -> bool:
        """Whether it is known how arrays lie: types say it on Explicit axes."""
        return _meshes.is_explicit(self.mesh) or bool(self.lie)

    @property
    def on_detour(self) -> bool:
        """Whether XLA does not say it either: for TPUs, with JAX 0.12 (its issue 38196)."""
        return not self.known and self.mesh.devices.flat[0].platform == "tpu"

    def spec(self, form: Form, x: jax.Array) -> P:
        """How an array lies along the axes or, where that is not known, how it is to lie."""
        if self.lie:
            if form.parameter not in self.lie:
                raise ValueError(
                    f"mesh: the shardings have none for {form.parameter!r}, only for "
                    f"{shown([*self.lie])}; give those of the parameters."
                )
            return _meshes.along(self.lie[form.parameter], self.axes)
        if not _meshes.is_explicit(self.mesh):
            return travel_spec(form, self.mesh, self.axes)
        sharding = _meshes.explicit_sharding(x)
        return P() if sharding is None else _meshes.along(sharding.spec, self.axes)

    def placed(self, state: DistributedState, layout: StateLayout) -> DistributedState:
        return jax.tree.map(
            lambda x, spec: _meshes.resharded(x, self.mesh, spec), state, layout.specs(self.axes)
        )

    started = placed  # from a whole state

    def run(
        self, step: Step, state: DistributedState, gradients: Matrices, *params: Matrices
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        """The update and the state of a step. Parameters travel as their gradients do."""
        specs = step.layout.specs(self.axes)
        trees, state = (gradients, *params), self.placed(state, step.layout)
        if not (self.known or self.on_detour):
            return self._where_xla_knows(step, specs, state, *trees)
        forms = (form for of_stack in gradients.forms.values() for form in of_stack)
        lie = {form.parameter: self.spec(form, gradients.arrays[form.parameter]) for form in forms}
        work = jax.shard_map(
            functools.partial(step.exchanged, gradients.forms, lie),
            mesh=self.mesh,
            in_specs=(specs, *(lie for _ in trees)),
            out_specs=(lie, specs),
            check_vma=False,
        )
        move = functools.partial(
            _meshes.travelled if self.on_detour else _meshes.resharded, mesh=self.mesh
        )
        arrays = [{n: move(m.arrays[n], spec=spec) for n, spec in lie.items()} for m in trees]
        updates, state = work(state, *arrays)
        return {n: _meshes.sharded_like(x, gradients.arrays[n]) for n, x in updates.items()}, state

    def _where_xla_knows(
        self, step: Step, specs: Any, state: DistributedState, *trees: Matrices
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        """The same on Auto axes, where only XLA knows how arrays lie: in three parts."""
        (gradients, *_), each = trees, P(self.axes)
        exchanged = functools.partial(_meshes.as_they_lie, mesh=self.mesh, axes=self.axes)
        way = functools.partial(Exchange, step.layout, gradients.forms, axes=self.axes)
        as_row = functools.partial(jax.tree.map, lambda x: x[None])  # of arrays of all devices
        of_row = functools.partial(jax.tree.map, lambda x: x[0])

        def sent(lie: Mapping[str, P], _: Any, arrays: dict[str, jax.Array]) -> ByOwner:
            return as_row(way(lie).sent(arrays))

        def work(state: DistributedState, *rows: ByOwner) -> tuple[ByOwner, DistributedState]:
            updates, state = step.update(state, *map(of_row, rows))
            return as_row(updates), state

        def returned(lie: Mapping[str, P], row: ByOwner, like: dict[str, jax.Array]) -> Any:
            return way(lie).returned(of_row(row), like)

        rows, state = jax.shard_map(
            work,
            mesh=self.mesh,
            in_specs=(specs, *(each for _ in trees)),
            out_specs=(each, specs),
            check_vma=False,
        )(state, *(exchanged(sent, rows=(), arrays=m.arrays) for m in trees))
        return exchanged(returned, rows=rows, arrays=gradients.arrays), state


@dataclasses.dataclass(frozen=True)
class Within:
    """Inside a mapped function, on one device's arrays, which all devices have alike."""

    axes: Axes
    on_detour = False

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
        own = functools.partial(device_part, axes=self.axes)
        return state._replace(**jax.tree.map(own, {"even": state.even, "dealt": state.dealt}))

    def run(
        self, step: Step, state: DistributedState, gradients: Matrices, *params: Matrices
    ) -> tuple[dict[str, jax.Array], DistributedState]:
        lie = dict.fromkeys(gradients.arrays, P())
        arrays = (m.arrays for m in (gradients, *params))
        return step.exchanged(gradients.forms, lie, state, *arrays)
