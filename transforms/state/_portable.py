"""The portable form of a state, for checkpoints.

In memory the matrices of several parameters share stacks, and with `mesh=` stacks are distributed
over the devices. The portable form depends on neither: it has one entry per parameter `(N, …)`, by
path, for its N matrices. On a mesh entries are sharded along the first other axis that the devices
divide, so that no device holds much more than its share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._own_state import arrays_in, difference
from .._paths import named_leaves
from ..distribute._distribute import Division
from ..matrices._view import MatrixViewState
from ._traced import Stack, Traced, described_stacks, is_view, stack_of, traced, with_stacks


def portable_state(optimizer: Any, params: Any, state: Any) -> Any:
    """The form of a state for checkpoints: the same on every mesh and for every `stack=`.

    Args:
      optimizer: the transformation that made `state`.
      params: the parameters (or their shapes) for which it was made.
      state: the state; or its shapes, as from `jax.eval_shape(optimizer.init, params)`, for which
        the result has shapes and shardings: the target to restore into.

    Returns:
      The state with an entry per parameter in place of each stack, and nothing distributed.

    Raises:
      ValueError: if `state` is not the state of this optimizer for these parameters.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> many, one = curvax.muon(0.02, mesh=mesh), curvax.muon(0.02)
      >>> portable = curvax.portable_state(many, params, many.init(params))
      >>> same = curvax.portable_state(one, params, one.init(params))
      >>> jax.tree.structure(portable) == jax.tree.structure(same)
      True
    """
    whole = traced(optimizer, params)
    return by_parameter(joined_state(whole, state))


def place_state(optimizer: Any, params: Any, portable: Any, *, description: Any = None) -> Any:
    """The inverse of `portable_state`, on the same mesh or another.

    Args:
      optimizer: the transformation that will use the state.
      params: its parameters, or their shapes.
      portable: the result of `portable_state`, restored from a checkpoint.
      description: if the checkpoint holds the state itself, not its portable form: the result of
        `describe_state`, which says which parameters each of its stacks holds. Each entry then goes
        to the parameter of its path, however stacks are ordered now.

    Returns:
      The state, stacked and distributed as the optimizer expects it.

    Raises:
      ValueError: if it is the state of another optimizer, or for other parameters, blocks or ranks;
        it names the first entry that differs, with both shapes.
    """
    whole = traced(optimizer, params)
    joined = whole.joined
    if description is not None:
        portable = by_parameter(with_stacks(portable, described_stacks(description)))
    portable = in_structure("portable", by_parameter(joined), portable)
    stacked = by_stack(joined, portable)

    def divided(node: Any, division: Division) -> Any:
        mesh = _mesh_of(division)
        specs = division.layout.specs(division.axes)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        return _moved(division.layout.divided, node, shardings, mesh)

    return whole.map_divided(divided, stacked)


def joined_state(whole: Traced, state: Any) -> Any:
    """The state of one device: stacks as they are, nothing distributed.

    Raises:
      ValueError: if `state` does not have the shapes of the traced one.
    """
    state = in_structure("state", whole.state, state)

    def joined(node: Any, division: Division) -> Any:
        shapes, mesh = division.layout.joined_shapes, _mesh_of(division)
        shardings = jax.tree.map(lambda x: _other_axis(mesh, division.axes, x), shapes)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(node)):
            return jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
            )
        return _moved(division.layout.joined, node, shardings, mesh)

    mesh = next((division.mesh for division in whole.divisions), None)
    return whole.map_divided(joined, state, lambda x: _target(x, mesh))


def by_parameter(state: Any) -> Any:
    """A traced state, or one with its keys, with an entry per parameter in place of each stack."""

    def of_view(node: Any) -> Any:
        if not is_view(node):
            return node
        stacks = {key: stack_of(key) for key in node.inner}
        return MatrixViewState(
            {
                name: jax.tree.map(functools.partial(_part, place=place, of=stack), node.inner[key])
                for key, stack in stacks.items()
                for name, place in stack.slices()
            }
        )

    return jax.tree.map(of_view, state, is_leaf=is_view)


def by_stack(like: Any, state: Any) -> Any:
    """The inverse of `by_parameter`, for a state whose stacked form is like `like`."""

    def of_view(own: Any, given: Any) -> Any:
        if not is_view(own):
            return given

        def joined(key: Any) -> Any:
            return jax.tree.map(_joined, *(given.inner[name] for name, _ in stack_of(key).members))

        return MatrixViewState({key: joined(key) for key in own.inner})

    return jax.tree.map(of_view, like, state, is_leaf=is_view)


def _joined(*parts: jax.Array) -> jax.Array:
    """The parts of a stack's array; of counts, which the parameters have alike, the largest."""
    if parts[0].ndim == 0:
        whole = jnp.issubdtype(parts[0].dtype, jnp.integer)
        return functools.reduce(jnp.maximum, parts) if whole else parts[0]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _part(x: Any, place: slice, of: Stack) -> Any:
    """One parameter's slice of a stack's array, or of its shape. Counts go to each parameter.

    Raises:
      ValueError: if the first axis of the array is not the stack's.
    """
    if x.ndim == 0:
        return x
    if x.shape[0] != of.size:
        raise ValueError(
            f"the entry of the stack {of.key!r} has shape {x.shape}: its first axis must be the "
            f"stack's, of {of.size} matrices. (quantize_state merges vectors: give it "
            "where=lambda place, leaf: leaf.ndim > 2.)"
        )
    if place == slice(0, of.size):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = (place.stop - place.start, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
    return x[place]


def in_structure(argument: str, like: Any, given: Any) -> Any:
    """The arrays of `given` in the containers of `like`, by their paths.

    A state in an `nnx.Optimizer` has every array in a box, and a checkpoint restored without a
    target has dicts and lists for tuples, and strings for numbers.

    Raises:
      ValueError: if an array is missing, left over, or of another shape or dtype.
    """
    own = named_leaves(like)
    arrays = arrays_in(given, own.names)
    message = difference(argument, own.present(), arrays)
    if message is not None:
        raise ValueError(message)
    return own.rebuild(arrays)


def _mesh_of(division: Division) -> Mesh:
    if division.mesh is None:
        raise ValueError(
            "a state distributed inside a mapped function (mesh_axis= without mesh=) has no "
            "portable form, because each device holds only its own part; use mesh= for checkpoints."
        )
    return division.mesh


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


def _other_axis(mesh: Mesh, axes: tuple[str, ...], x: Any) -> NamedSharding:
    devices = math.prod(mesh.shape[a] for a in axes)
    for i in range(1, x.ndim):
        if x.shape[i] % devices == 0:
            return NamedSharding(mesh, P(*[None] * i, axes))
    return NamedSharding(mesh, P())
