"""Checkpoints of a distributed state that do not depend on the devices.

With `mesh=` the layout of a state depends on the number of devices. Its portable form is the state
of the same optimizer without a mesh: one stack entry per matrix, without padding. Its stacks are
sharded along the first other axis that the devices divide, so that no device holds much more than
its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._recording import recording
from ..distribute._distribute import DivisionRecord
from ..distribute._layout import is_divided


class Division(NamedTuple):
    """An optimizer's abstract state, and the records of its distributed parts in order."""

    state: Any
    records: tuple[DivisionRecord, ...]

    def map(
        self,
        f: Callable[[Any, DivisionRecord], Any],
        state: Any,
        undivided: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> Any:
        """`state` with `f(node, record)` for distributed parts and `undivided(leaf)` for others.

        Raises:
          ValueError: if the structure of `state` is not this optimizer's.
        """
        treedef = jax.tree.structure(self.state, is_leaf=is_divided)
        records = iter(self.records)
        nodes = [
            f(node, next(records)) if is_divided(own) else undivided(node)
            for own, node in zip(
                jax.tree.leaves(self.state, is_leaf=is_divided),
                treedef.flatten_up_to(state),
                strict=True,
            )
        ]
        return treedef.unflatten(nodes)


def division(optimizer: Any, params: Any) -> Division:
    """How an optimizer distributes its state for these parameters (or their shapes)."""
    found: list[tuple[DivisionRecord, ...]] = []

    def traced(params: Any) -> Any:
        with recording() as events:
            state = optimizer.init(params)
        records = {id(e.state): e for e in events if isinstance(e, DivisionRecord)}
        parts = filter(is_divided, jax.tree.leaves(state, is_leaf=is_divided))
        found.append(tuple(records[id(part)] for part in parts))
        return state

    return Division(jax.eval_shape(traced, params), found[0])


def portable_state(optimizer: Any, params: Any, state: Any) -> Any:
    """The form of a state for checkpoints: that of one device, whatever its mesh.

    Args:
      optimizer: the transformation that made `state`.
      params: the parameters (or their shapes) for which it was made.
      state: the state; or its shapes, as from `jax.eval_shape(optimizer.init, params)`, for which
        the result has shapes and shardings: the target to restore into.

    Returns:
      The state that the optimizer would have without `mesh=`; `state` itself if it has none.

    Raises:
      ValueError: if `state` is not the state of this optimizer for these parameters.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> many, one = curvax.muon(0.02, mesh=mesh), curvax.muon(0.02)
      >>> portable = curvax.portable_state(many, params, many.init(params))
      >>> jax.tree.structure(portable) == jax.tree.structure(one.init(params))
      True
    """
    whole = division(optimizer, params)
    _check_shapes("state", whole.state, state)

    def joined(node: Any, record: DivisionRecord) -> Any:
        shapes, mesh = record.layout.joined_shapes, _mesh_of(record)
        shardings = jax.tree.map(lambda x: _other_axis(mesh, record.axes, x), shapes)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(node)):
            return jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
            )
        return _moved(record.layout.joined, node, shardings, mesh)

    mesh = next((record.mesh for record in whole.records), None)
    return whole.map(joined, state, lambda x: _target(x, mesh))


def place_state(optimizer: Any, params: Any, portable: Any) -> Any:
    """The inverse of `portable_state`, on the same mesh or another.

    Args:
      optimizer: the transformation that will use the state.
      params: its parameters, or their shapes.
      portable: the result of `portable_state`, restored from a checkpoint.

    Returns:
      The state, distributed as the optimizer expects it.

    Raises:
      ValueError: if it is the state of another optimizer, or for other parameters, blocks or ranks;
        it names the first entry that differs, with both shapes.
    """
    whole = division(optimizer, params)
    shapes = whole.map(lambda _, record: record.layout.joined_shapes, whole.state)
    _check_shapes("portable", shapes, portable)

    def divided(node: Any, record: DivisionRecord) -> Any:
        mesh = _mesh_of(record)
        parts = jax.eval_shape(record.layout.divided, record.layout.joined_shapes)
        shardings = jax.tree.map(lambda x: first_axis(mesh, record.axes, x), parts)
        return _moved(record.layout.divided, node, shardings, mesh)

    return whole.map(divided, portable)


def _mesh_of(record: DivisionRecord) -> Mesh:
    if record.mesh is None:
        raise ValueError(
            "a state distributed inside a mapped function (mesh_axis= without mesh=) has no "
            "portable form, because each device holds only its own part; use mesh= for checkpoints."
        )
    return record.mesh


def _target(x: Any, mesh: Mesh | None) -> Any:
    """`x`, with the sharding to restore it to if it is a shape."""
    if mesh is None or not isinstance(x, jax.ShapeDtypeStruct):
        return x
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _moved(f: Callable[[Any], Any], tree: Any, shardings: Any, mesh: Mesh) -> Any:
    """`f(tree)` with these shardings; the compiler chooses the transfers.

    Explicit axes would require spelling out every transfer, so this runs on the same devices with
    Auto axes, which copies nothing.
    """
    auto = Mesh(mesh.devices, mesh.axis_names)

    def placed(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
            return jax.device_put(x, NamedSharding(auto, sharding.spec))
        return jax.device_put(x, NamedSharding(auto, P()))

    there = jax.tree.map(lambda s: NamedSharding(auto, s.spec), shardings)
    done = jax.jit(f, out_shardings=there)(jax.tree.map(placed, tree))
    return jax.device_put(done, shardings)


def first_axis(mesh: Mesh, axes: tuple[str, ...], x: Any) -> NamedSharding:
    """The sharding of an array of a distributed state."""
    return NamedSharding(mesh, P(axes) if x.ndim else P())


def _other_axis(mesh: Mesh, axes: tuple[str, ...], x: Any) -> NamedSharding:
    devices = math.prod(mesh.shape[a] for a in axes)
    for i in range(1, x.ndim):
        if x.shape[i] % devices == 0:
            return NamedSharding(mesh, P(*[None] * i, axes))
    return NamedSharding(mesh, P())


def _check_shapes(argument: str, own: Any, given: Any) -> None:
    """Requires a tree of arrays to have the structure, shapes and dtypes of another."""

    def described(tree: Any) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{[*x.shape]}"
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    mine, other = described(own), described(given)
    for place in {**mine, **other}:
        has, wants = other.get(place, "nothing"), mine.get(place, "nothing")
        if has != wants:
            raise ValueError(
                f"{argument} has {has} at {place!r}, where this optimizer has {wants}: it belongs "
                "to another optimizer, or to other parameters, blocks, ranks or devices."
            )
