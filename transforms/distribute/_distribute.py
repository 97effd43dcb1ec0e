"""Distributing matrices over devices: each device stores and updates its own.

`distribute(inner, mesh)` replaces `inner` behind the matrix view. Matrices never influence each
other, so each device runs `inner` on its own matrices inside `shard_map`: the statistics, checks
and refreshes of a matrix happen on its owner without communication. Each step sends gradients to
their owners and updates back. Where there are too few matrices for that, devices share the work of
one: each has a part of its state, gets the whole for the step, and `inner` divides the products
(`shared_axis`, which `orthogonalize` takes).

*Numerics.* Those of one device. With `stagger` each device spreads its own refreshes. *Memory.* A
device holds the state of its own matrices (`_shares.py`). *Communication*: `docs/distribution.md`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from .._paths import is_placeholder
from .._recording import Key, Work, is_recording, record, recording
from .._stacks import Plan, init_each, plan_of, planned
from .._validate import as_transformation
from ._layout import StateLayout
from ._meshes import axis_names, is_explicit, mesh_axes
from ._shares import cost, product_cost
from ._step import Matrices, OnMesh, Step, Within

SMALLEST = 1024
"""Matrices of smaller orders are not shared: an exchange takes longer to begin than their work."""


class Division(NamedTuple):
    """How a state is distributed, for `recording`."""

    layout: StateLayout
    mesh: Mesh | None
    axes: tuple[str, ...]
    on_detour: bool  # whether gradients do not go straight to their owners

    def devices(self) -> Iterator[tuple[str, str]]:
        """Each stack, and the number of devices that share its matrices."""
        number = self.layout.shares.devices
        for key, stack in self.layout.stacks.items():
            if key in self.layout.shares.shared:
                left = stack.shape[0] - self.layout.shares.even[key]
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
      ValueError: if `inner` is not a transformation, or the mesh has no such axis.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> divided = curvax.distribute(curvax.orthogonalize("svd"), mesh)
      >>> stacks = {"2x3": jnp.ones((12, 2, 3))}
      >>> updates, state = jax.jit(divided.update)(stacks, divided.init(stacks))
      >>> updates["2x3"].shape
      (12, 2, 3)
    """
    inner = as_transformation("inner", inner)
    if mesh is None:
        if axis is not None:
            raise ValueError(f"axis={axis!r} needs mesh=.")
        return divided_over(Within(axis_names("axis_name (mesh_axis)", axis_name)), inner)
    if axis_name is not None:
        raise ValueError(f"axis_name={axis_name!r} is for mapped functions; give it without mesh=.")
    return divided_over(OnMesh(mesh, mesh_axes(mesh, axis)), inner)


def divided_over(
    exchange: OnMesh | Within,
    inner: optax.GradientTransformationExtraArgs,
    restart: Callable[..., dict[str, Any]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`distribute` over the devices of `exchange`.

    `restart(states, likes)` returns the states of stacks with damaged matrices started anew.
    """
    mesh = exchange.mesh if isinstance(exchange, OnMesh) else None
    layout_of = _layouts(inner.init, exchange)

    def init(params: Any) -> Any:
        if is_placeholder(params):
            return params
        if not params:  # no matrices, and nothing to distribute
            return {}
        layout = layout_of(params)
        division = Division(layout, mesh, exchange.axes, exchange.on_detour)
        record(division)
        plan = {  # which knows the owner of each matrix
            key: array._replace(devices=layout.shares.devices_of(key, len(array.devices)))
            for key, array in plan_of(params).arrays.items()
        }
        with planned(Plan(plan)):
            states = init_each(inner.init, params)
        state = exchange.started(layout.divided(states), layout)
        if is_recording():
            keys = {key: Key(key, getattr(key, "about", None), division) for key in params}
            state = state._replace(common={keys[key]: x for key, x in state.common.items()})
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        if not updates:
            return updates, state
        trees = [Matrices.of(tree) for tree in (updates, params) if tree is not None]
        layout = layout_of(trees[-1].stacks)
        if not layout.fits(state, exchange.holders):
            raise ValueError(
                "state: it belongs to other parameters, or to another number of devices."
                + " Or update needs params: their dtypes are not the gradients'." * (params is None)
            )
        step = Step(inner, restart, layout, exchange.axes, extra_args)
        try:
            return exchange.run(step, state, *trees)
        except NotImplementedError as error:
            if mesh is None or not is_explicit(mesh):
                raise
            raise ValueError(
                "mesh: JAX does not take this update on an Explicit mesh, see above. Numbers of a "
                "direction must not be tracers there, as those of inject_hyperparams are. Give "
                "schedules to b1, b2, b3, weight_decay and learning_rate themselves, or take Auto "
                "axes: jax.make_mesh(…, axis_types=(jax.sharding.AxisType.Auto, …))."
            ) from error

    return optax.GradientTransformationExtraArgs(init, update)


def _layouts(
    init: Callable[[Any], Any], exchange: OnMesh | Within
) -> Callable[[Mapping[str, Any]], StateLayout]:
    """The layout of stacks, computed once for those of equal shapes: it traces `init` often."""

    @functools.cache
    def cached(devices: int, *stacks: tuple[str, jax.ShapeDtypeStruct]) -> StateLayout:
        like = dict(stacks)
        with recording() as events:
            # Anew: a cached trace records nothing.
            jax.eval_shape(lambda x: init(x), stacks[0][1])
        if {event for event in events if isinstance(event, Work)} != {Work("products")}:
            return StateLayout(init, like, devices, (), cost)
        divisible = [  # In a mapped function no device gets a part of a matrix.
            key
            for key, x in stacks
            if isinstance(exchange, OnMesh)
            and min(x.shape[1:]) >= SMALLEST
            and x.shape[0] % devices
            and max(x.shape[1:]) % devices == 0
        ]
        return StateLayout(init, like, devices, divisible, product_cost)

    def layout_of(stacks: Mapping[str, Any]) -> StateLayout:
        like = ((str(key), jax.ShapeDtypeStruct(x.shape, x.dtype)) for key, x in stacks.items())
        return cached(exchange.devices, *like)

    return layout_of
