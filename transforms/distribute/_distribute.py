"""Distributing matrices over devices: each device stores and updates its own.

`distribute(inner, mesh)` replaces `inner` behind the matrix view. Batch entries never influence
each other, so each device runs `inner` on its own matrices inside `shard_map`: the statistics,
checks and refreshes of a matrix happen on its owner without communication. Each step sends
gradients to their owners and updates back. Where there are too few matrices for that, devices share
the work of one, if its transformation consists of products (`_cut.py`).

*Numerics.* Those of one device, except that with `stagger` each device spreads its own refreshes
over the period. *Memory.* A device holds the state of its own matrices (`_shares.py`).
*Communication.* See `docs/distribution.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._paths import is_placeholder
from .._recording import record
from .._validate import check_choice
from ..linalg._spread import spreading
from ._cut import divisible, spec_of
from ._layout import DistributedState, StateLayout, is_divided
from ._meshes import is_explicit, put, sharded_like
from ._routes import Route
from ._shares import Round

Stacks = dict[str, jax.Array]


class DivisionRecord(NamedTuple):
    """What `distribute` records: the state and its layout."""

    state: DistributedState
    layout: StateLayout
    mesh: Mesh | None
    axes: tuple[str, ...]

    def devices(self) -> Iterator[tuple[str, str]]:
        """Each stack, and the number of devices that share its matrices."""
        number = self.layout.shares.devices
        for key, stack in self.layout.stacks.items():
            if key in self.layout.shares.cut:
                left = stack.shape[0] - self.layout.shares.whole(key)
                matrices = "1 matrix" if left == 1 else f"{left} matrices"
                yield key, f"on {number} of {number} devices, which share {matrices}"
            else:
                yield key, f"on {min(number, stack.shape[0])} of {number} devices"


def distribute(
    inner: optax.GradientTransformation,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation on stacks of matrices, with the matrices distributed over devices.

    Args:
      inner: a transformation on a dict of stacks `(N, m, n)` in which no matrix influences another.
        `on_matrices(inner, mesh=…)` makes the stacks and calls this function.
      mesh: the devices; its axes may be Auto or Explicit.
      axis: the mesh axis or axes to distribute over; all by default.
      axis_name: instead of a mesh, the axis or axes of the `pmap` or `shard_map` in which `init`
        and `update` are called. Gradients must be equal on all its devices; each has its own state.

    Returns:
      The same transformation, with its state distributed over the devices.

    Raises:
      ValueError: if the mesh has no such axis.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> divided = curvax.distribute(curvax.orthogonalize("svd"), mesh)
      >>> stacks = {"2x3": jnp.ones((12, 2, 3))}
      >>> updates, state = jax.jit(divided.update)(stacks, divided.init(stacks))
      >>> updates["2x3"].shape
      (12, 2, 3)
    """
    inner = optax.with_extra_args_support(inner)
    if mesh is None:
        if axis is not None:
            raise ValueError(f"axis={axis!r} needs mesh=.")
        return _within(inner, _names("axis_name (mesh_axis)", axis_name))
    if axis_name is not None:
        raise ValueError(f"axis_name={axis_name!r} is for mapped functions; give it without mesh=.")
    return _over(inner, mesh, mesh_axes(mesh, axis))


def _over(
    inner: optax.GradientTransformationExtraArgs, mesh: Mesh, axes: tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """`distribute` over a mesh."""
    devices = math.prod(mesh.shape[a] for a in axes)

    def layout_of(like: Any) -> StateLayout:
        stacks = _abstract(like)
        return StateLayout(inner.init, stacks, devices, divisible(inner, stacks, devices))

    def placed(state: DistributedState, layout: StateLayout) -> DistributedState:
        return jax.tree.map(lambda x, spec: put(x, mesh, spec), state, layout.specs(axes))

    def routes(stacks: Stacks) -> dict[str, Route]:
        return {key: Route.of(key, stack, mesh, axes) for key, stack in stacks.items()}

    def init(params: Any) -> Any:
        if is_placeholder(params):
            return DistributedState(inner.init(params), params, ())
        layout = layout_of(params)
        state = placed(layout.divided(inner.init(params)), layout)
        record(DivisionRecord(state, layout, mesh, axes))
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        layout = layout_of(updates if params is None else params)
        _check_layout(layout, params, state)
        given, shared = [], []
        for stacks in (updates, params):
            if stacks is not None:
                whole, left, cut = layout.shares.split(stacks)
                way = routes(stacks)
                whole = {key: way[key].to_owners(x) for key, x in whole.items()}
                rounds = [
                    {key: way[key].dealt_out(left[key], r) for key in r.kinds}
                    for r in layout.shares.rounds
                ]
                given.append((whole, rounds))
                shared.append(cut)
        state = placed(state, layout)
        dealt, specs = (x._replace(cut=()) for x in (state, layout.specs(axes)))
        work = jax.shard_map(
            _Own(inner, layout, axes, extra_args).update,
            mesh=mesh,
            in_specs=(specs, *[P(axes)] * len(given)),
            out_specs=(P(axes), P(axes), specs),
            check_vma=False,
        )
        try:
            whole, rounds, dealt = work(dealt, *given)
        except NotImplementedError as error:
            if "Closing over" not in str(error):
                raise
            raise ValueError(
                "mesh: hyperparameters cannot be tracers on an Explicit mesh (inject_hyperparams "
                "makes them tracers), because shard_map cannot close over them. Give a mesh with "
                "Auto axes: jax.make_mesh(…, axis_types=(jax.sharding.AxisType.Auto, …))."
            ) from error
        way = routes(updates)
        whole = {key: way[key].from_owners(x) for key, x in whole.items()}
        rounds = [
            {key: way[key].back(x, r) for key, x in found.items()}
            for r, found in zip(layout.shares.rounds, rounds, strict=True)
        ]
        cut, own = {}, ()
        if layout.shares.cut:
            together = _Shared(inner, layout, mesh, axes, extra_args)
            cut, own = together.update(layout.scalars(state.whole), state.cut, *shared)
        updates = layout.shares.joined(updates, whole, rounds, cut, sharded_like)
        return updates, dealt._replace(cut=own)

    return optax.GradientTransformationExtraArgs(init, update)


def _within(
    inner: optax.GradientTransformationExtraArgs, axes: tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """`distribute` inside a mapped function, on one device's arrays."""

    def devices() -> int:
        try:
            return jax.lax.axis_size(axes)
        except NameError as error:
            raise ValueError(
                f"axis_name: {', '.join(map(repr, axes))} is not an axis of an enclosing pmap or "
                "shard_map; call init and update inside one, or give mesh=."
            ) from error

    def own(x: jax.Array) -> jax.Array:
        size = x.shape[0] // devices()
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)

    def init(params: Any) -> Any:
        if is_placeholder(params):
            return DistributedState(inner.init(params), params, ())
        layout = StateLayout(inner.init, _abstract(params), devices())
        state = layout.divided(inner.init(params))
        state = jax.tree.map(lambda x: own(x) if x.ndim else x, state)
        record(DivisionRecord(state, layout, None, axes))
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        layout = StateLayout(
            inner.init, _abstract(updates if params is None else params), devices()
        )
        _check_layout(layout, params, state, holders=devices())
        given = []
        index = jax.lax.axis_index(axes)
        for stacks in (updates, params):
            if stacks is not None:
                whole, left, _ = layout.shares.split(stacks)
                rounds = [
                    {
                        key: jax.lax.dynamic_index_in_dim(
                            left[key], jnp.array(r.entries(key, 0))[index]
                        )
                        for key in r.kinds
                    }
                    for r in layout.shares.rounds
                ]
                given.append((jax.tree.map(own, whole), rounds))
        work = _Own(inner, layout, axes, extra_args)
        whole, rows, state = work.flat(state, *given)
        whole, rows = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), (whole, rows))
        rounds = [
            {key: work.matrices(row, key)[jnp.array(r.owners(key))] for key in r.kinds}
            for r, row in zip(layout.shares.rounds, rows, strict=True)
        ]
        return layout.shares.joined(updates, whole, rounds, {}, lambda x, _: x), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_layout(layout: StateLayout, params: Any, state: Any, holders: int = 1) -> None:
    """Requires `state` to have this layout, or to be one of `holders` equal parts.

    Raises:
      ValueError: if it has not.
    """
    if not (is_divided(state) and layout.fits(state, holders)):
        raise ValueError(
            "state: it belongs to other parameters, or to another number of devices."
            + " Or update needs params: their dtypes are not the gradients'." * (params is None)
        )


class _Own:
    """The work of one device on its own matrices, inside a mapped axis."""

    def __init__(self, inner: Any, layout: StateLayout, axes: Any, extra_args: Any):
        self.inner, self.layout, self.axes, self.extra_args = inner, layout, axes, extra_args

    def update(self, *given: Any) -> Any:
        """The device's updates and state; of a round, its matrix for each kind, right for one."""
        updates, rows, state = self.flat(*given)
        rounds = [
            {key: self.matrices(row, key) for key in r.kinds}
            for r, row in zip(self.layout.shares.rounds, rows, strict=True)
        ]
        return updates, rounds, state

    def matrices(self, rows: jax.Array, key: str) -> jax.Array:
        """Flat rows as matrices of a stack."""
        shape = self.layout.stacks[key].shape[1:]
        return rows[:, : math.prod(shape)].reshape(-1, *shape)

    def flat(self, state: DistributedState, gradients: Any, params: Any = (None, None)):
        """The device's updates and state; the updates of a round's matrix as a flat row."""
        scalars = self.layout.scalars(state.whole)
        updates, whole = self.inner.update(gradients[0], state.whole, params[0], **self.extra_args)
        rows, singles = [], []
        rounds = self.layout.shares.rounds
        parameters = [None] * len(rounds) if params[1] is None else params[1]
        for r, buffers, *given in zip(rounds, state.singles, gradients[1], parameters, strict=True):
            own = {dtype: x[0] for dtype, x in buffers.items()}
            row, own = self._single(r, own, scalars, *given)
            rows.append(row[None])
            singles.append({dtype: x[None] for dtype, x in own.items()})
        return updates, tuple(rows), DistributedState(whole, tuple(singles), ())

    def _single(self, r: Round, buffers: Any, scalars: Any, gradients: Any, params: Any):
        lengths = {dtype: x.size for dtype, x in buffers.items()}
        size, dtype = _row_of([gradients[key] for key in r.kinds])

        def work(key: str) -> Callable[[Any], Any]:
            def branch(buffers: Any) -> Any:
                gradient = {key: gradients[key]}
                parameter = None if params is None else {key: params[key]}
                part = self.layout.single[key]
                state = part.state(self.layout.unpacked(key, buffers), scalars)
                update, state = self.inner.update(gradient, state, parameter, **self.extra_args)
                row = update[key].astype(dtype).reshape(-1)
                row = jnp.pad(row, (0, size - row.size))
                return row, self.layout.packed(part.own(jax.tree.leaves(state)), lengths)

            return branch

        def nothing(buffers: Any) -> Any:
            return jnp.zeros(size, dtype), buffers

        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        return jax.lax.switch(kind, [*map(work, r.kinds), nothing], buffers)


class _Shared:
    """The work of all devices on the matrices that they share."""

    def __init__(self, inner: Any, layout: StateLayout, mesh: Mesh, axes: Any, extra_args: Any):
        self.inner, self.layout, self.extra_args = inner, layout, extra_args
        self.mesh, self.axes = mesh, axes

    def update(self, scalars: Any, own: Any, gradients: Any, params: Any = None) -> tuple[Any, Any]:
        """Updates, and the arrays of the state."""
        given = jax.tree.map(lambda x: put(x, self.mesh, self._spec(x)), (own, gradients, params))
        work: Any = self._work
        if is_explicit(self.mesh):  # there JAX leaves no product to the partitioner
            results = (gradients, own)
            shardings = jax.tree.map(lambda x: NamedSharding(self.mesh, self._spec(x)), results)
            work = jax.sharding.auto_axes(work, axes=self.mesh.axis_names, out_sharding=shardings)
            return work(scalars, *given)
        return jax.tree.map(lambda x: put(x, self.mesh, self._spec(x)), work(scalars, *given))

    def _work(self, scalars: Any, own: Any, gradients: Any, params: Any) -> tuple[Any, Any]:
        state = self.layout.cut.state(own, scalars)
        with spreading(self._cut):
            updates, state = self.inner.update(gradients, state, params, **self.extra_args)
        return updates, tuple(self.layout.cut.own(jax.tree.leaves(state)))

    def _spec(self, x: Any) -> P:
        return spec_of(x.shape, self.axes, self.layout.shares.devices)

    def _cut(self, x: jax.Array) -> jax.Array:
        there = jax.sharding.get_abstract_mesh() if is_explicit(self.mesh) else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(there, self._spec(x)))


def _row_of(stacks: Sequence[Any]) -> tuple[int, Any]:
    """The length and dtype of a round's updates."""
    return max(math.prod(x.shape[1:]) for x in stacks), jnp.result_type(*stacks)


def _abstract(stacks: Stacks) -> dict[str, jax.ShapeDtypeStruct]:
    return {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in stacks.items()}


def mesh_axes(mesh: Any, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the mesh axes to distribute over.

    Raises:
      ValueError: if `mesh` is not a mesh or has no such axis.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
    axes = mesh.axis_names if axis is None else _names("axis (mesh_axis)", axis)
    for name in axes:
        check_choice("axis (mesh_axis)", name, mesh.axis_names)
    if len(set(mesh.axis_types)) > 1:
        raise ValueError(f"mesh: its axes must be all Auto or all Explicit, got {mesh.axis_types}.")
    return axes


def _names(argument: str, axes: Any) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    listed = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not listed or not names or len(set(names)) < len(names):
        raise ValueError(f"{argument} must be the name of an axis or of several, got {axes!r}.")
    return tuple(names)
