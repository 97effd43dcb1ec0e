"""Distributing matrices over devices: each device stores and updates its own.

`distribute(inner, mesh)` replaces `inner` behind the matrix view. Matrices never influence each
other, so each device runs `inner` on its own matrices inside `shard_map`: the statistics, checks
and refreshes of a matrix happen on its owner without communication. Each step sends gradients to
their owners and updates back. Where there are too few matrices for that, devices share the work of
one: each has a part of its state, gets the whole for the step, and `inner` divides the products
(`shared_axis`, which `orthogonalize` takes).

*Numerics.* Those of one device. With `stagger` each device spreads its own refreshes over the
period. *Memory.* A device holds the state of its own matrices (`_shares.py`). *Communication.* See
`docs/distribution.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._paths import is_placeholder
from .._recording import Key, Work, is_recording, known, record, recording
from .._stacks import Plan, init_each, plan_of, planned
from ._layout import DistributedState, StackShapes, StateLayout, is_divided
from ._meshes import Route, axis_names, is_explicit, mesh_axes, put, sharded_like
from ._shares import Stacks
from ._step import Given, Step

SMALLEST = 1024
"""Matrices of smaller orders are not shared: an exchange takes longer to begin than their work."""


class Division(NamedTuple):
    """How a state is distributed, for `recording`."""

    layout: StateLayout
    mesh: Mesh | None
    axes: tuple[str, ...]

    def devices(self) -> Iterator[tuple[str, str]]:
        """Each stack, and the number of devices that share its matrices."""
        number = self.layout.shares.devices
        for key, stack in self.layout.stacks.items():
            if key in self.layout.shares.shared:
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
      inner: a transformation of a stack `(N, m, n)` in which no matrix influences another.
        `on_matrices(inner, mesh=…)` makes the stacks and calls this function.
      mesh: the devices; its axes may be Auto or Explicit.
      axis: the mesh axis or axes to distribute over; all by default.
      axis_name: instead of a mesh, the axis or axes of the `pmap` or `shard_map` in which `init`
        and `update` are called. Gradients must be equal on all its devices; each has its own state.

    Returns:
      A transformation of a dict of stacks, with its state distributed over the devices.

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
        return _within(inner, axis_names("axis_name (mesh_axis)", axis_name))
    if axis_name is not None:
        raise ValueError(f"axis_name={axis_name!r} is for mapped functions; give it without mesh=.")
    return _over_mesh(inner, mesh, mesh_axes(mesh, axis))


def _over_mesh(
    inner: optax.GradientTransformationExtraArgs, mesh: Mesh, axes: tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """`distribute` over a mesh."""
    devices = math.prod(mesh.shape[a] for a in axes)

    @_layouts
    def layout_of(like: StackShapes) -> StateLayout:
        return StateLayout(inner.init, like, devices, _divisible(inner.init, like, devices))

    def placed(state: DistributedState, layout: StateLayout) -> DistributedState:
        return jax.tree.map(lambda x, spec: put(x, mesh, spec), state, layout.specs(axes))

    def init(params: Any) -> Any:
        if is_placeholder(params):
            return params
        if not params:  # no matrices, and nothing to distribute
            return {}
        stacks = _keyed(params)
        layout = layout_of(stacks)
        _note_division(Division(layout, mesh, axes), stacks)
        return placed(layout.divided(_init(inner.init, layout, stacks)), layout)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        if not updates:
            return updates, state
        layout = layout_of(updates if params is None else params)
        _check_layout(layout, params, state)
        way = {key: Route.of(key, x, mesh, axes) for key, x in updates.items()}

        def sent(stacks: Stacks) -> Given:
            even, left, shared = layout.shares.parts(stacks)
            own = {key: Route.of(key, x, mesh, axes) for key, x in stacks.items()}
            return Given(
                {key: own[key].to_owners(x) for key, x in even.items()},
                [
                    {key: own[key].dealt_out(left[key], r) for key in r.kinds}
                    for r in layout.shares.rounds
                ],
                {key: put(x, mesh, P()) for key, x in shared.items()},
            )

        given = [sent(stacks) for stacks in (updates, params) if stacks is not None]
        specs = layout.specs(axes)
        step = Step(inner, layout, axes, extra_args)
        work = jax.shard_map(
            step.update,
            mesh=mesh,
            in_specs=(specs, *[Given(P(axes), P(axes), P())] * len(given)),
            out_specs=(Given(P(axes), P(axes), P()), specs),
            check_vma=False,
        )
        try:
            found, state = work(placed(state, layout), *given)
        except NotImplementedError as error:
            if not is_explicit(mesh):
                raise
            raise ValueError(
                "mesh: JAX does not take this update on an Explicit mesh, see above. "
                "Hyperparameters that are tracers, as those of inject_hyperparams, need Auto axes: "
                "jax.make_mesh(…, axis_types=(jax.sharding.AxisType.Auto, …))."
            ) from error
        even = {key: way[key].from_owners(x) for key, x in found.even.items()}
        rounds = [
            {key: way[key].back(step.matrices(row, key), r) for key in r.kinds}
            for r, row in zip(layout.shares.rounds, found.dealt, strict=True)
        ]
        return layout.shares.joined(updates, even, rounds, found.shared, sharded_like), state

    return optax.GradientTransformationExtraArgs(init, update)


def _within(
    inner: optax.GradientTransformationExtraArgs, axes: tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """`distribute` inside a mapped function, on one device's arrays."""

    def layout_of(stacks: Mapping[str, Any]) -> StateLayout:
        try:
            devices = jax.lax.axis_size(axes)
        except NameError as error:
            raise ValueError(
                f"axis_name: {', '.join(map(repr, axes))} is not an axis of an enclosing pmap or "
                "shard_map; call init and update inside one, or give mesh=."
            ) from error
        return StateLayout(inner.init, _abstract(stacks), devices)

    def own(x: jax.Array) -> jax.Array:
        size = x.shape[0] // jax.lax.axis_size(axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)

    def init(params: Any) -> Any:
        if is_placeholder(params):
            return params
        if not params:
            return {}
        stacks = _keyed(params)
        layout = layout_of(stacks)
        _note_division(Division(layout, None, axes), stacks)
        state = layout.divided(_init(inner.init, layout, stacks))
        return state._replace(
            even=jax.tree.map(own, state.even), dealt=jax.tree.map(own, state.dealt)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        if not updates:
            return updates, state
        layout = layout_of(updates if params is None else params)
        _check_layout(layout, params, state, holders=layout.shares.devices)
        index = jax.lax.axis_index(axes)

        def taken(stacks: Stacks) -> Given:
            even, left, _ = layout.shares.parts(stacks)
            rounds = [
                {
                    key: jax.lax.dynamic_index_in_dim(
                        left[key], jnp.array(r.entries(key, 0))[index]
                    )
                    for key in r.kinds
                }
                for r in layout.shares.rounds
            ]
            return Given(jax.tree.map(own, even), rounds, {})

        step = Step(inner, layout, axes, extra_args)
        given = [taken(stacks) for stacks in (updates, params) if stacks is not None]
        found, state = step.update(state, *given)
        even, rows = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axes, tiled=True), (found.even, found.dealt)
        )
        rounds = [
            {key: step.matrices(row, key)[jnp.array(r.owners(key))] for key in r.kinds}
            for r, row in zip(layout.shares.rounds, rows, strict=True)
        ]
        return layout.shares.joined(updates, even, rounds, {}, lambda x, _: x), state

    return optax.GradientTransformationExtraArgs(init, update)


def _layouts(
    layout_of: Callable[[StackShapes], StateLayout],
) -> Callable[[Mapping[str, Any]], StateLayout]:
    """`layout_of` the shapes of stacks, computed once for equal ones: it traces `init` often.

    While somebody listens, the keys of the stacks are not those of others.
    """
    cached = functools.cache(lambda *like: layout_of(dict(like)))

    def of(stacks: Mapping[str, Any]) -> StateLayout:
        like = _abstract(stacks)
        return layout_of(like) if is_recording() else cached(*like.items())

    return of


def _init(init: Callable[[Any], Any], layout: StateLayout, stacks: Stacks) -> dict[str, Any]:
    """The states of one device, in a plan that knows the owner of each matrix."""
    arrays = plan_of(stacks).arrays
    owners = {key: layout.shares.devices_of(key) for key in arrays}
    plan = {key: own._replace(devices=owners[key]) for key, own in arrays.items()}
    with planned(Plan(plan)):
        return init_each(init, stacks)


def _keyed(stacks: Stacks) -> Stacks:
    """The stacks; if somebody listens, with keys that can say how they are distributed."""
    return dict(zip(known(stacks), stacks.values(), strict=True)) if is_recording() else stacks


def _note_division(division: Division, stacks: Stacks) -> None:
    """Notes in the keys of the stacks how they are distributed, if somebody listens."""
    record(division)
    for key in stacks:
        if isinstance(key, Key):
            key.division = division


def _divisible(init: Callable[[Any], Any], stacks: Mapping[str, Any], devices: int) -> list[str]:
    """The stacks `(N, m, n)` with a remainder of matrices that devices could share.

    They can if all parts of the transformation say that their work is products.
    """
    large = [
        key
        for key, x in stacks.items()
        if min(x.shape[1:]) >= SMALLEST and x.shape[0] % devices and max(x.shape[1:]) % devices == 0
    ]
    if not large:
        return []
    with recording() as events:
        jax.eval_shape(lambda x: init(x), stacks[large[0]])  # anew: a cached trace records nothing
    work = {event for event in events if isinstance(event, Work)}
    return large if work == {Work("products")} else []


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


def _abstract(stacks: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in stacks.items()}
