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
from jax.tree_util import GetAttrKey

from .._own_state import arrays_in, difference
from .._paths import named_leaves
from ..distribute._distribute import Division
from ..matrices._view import MatrixViewState
from ._description import stacks_in
from ._sharding import state_sharding
from ._traced import Stack, Traced, is_view, place_of, stack_of, traced

INNER = GetAttrKey("inner")  # the field of a matrix view with its stacks


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
      The state, stacked and distributed as the optimizer expects it. If the optimizer has a mesh,
      arrays that are not on it go there, with the shardings of `state_sharding`.

    Raises:
      ValueError: if it is the state of another optimizer, or for other parameters, blocks or ranks;
        it names the first entry that differs, with both shapes.
    """
    whole = traced(optimizer, params)
    joined = whole.joined
    if description is not None:
        portable = _split(joined, portable, stacks_in(description))
    portable = in_structure("portable", by_parameter(joined), portable)
    stacked = by_stack(joined, portable)

    def divided(node: Any, division: Division) -> Any:
        mesh = _mesh_of(division)
        specs = division.layout.specs(division.axes)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        return _moved(division.layout.divided, node, shardings, mesh)

    placed, mesh = whole.map_divided(divided, stacked), whole.mesh
    if mesh is None:
        return placed
    shardings = state_sharding(optimizer, params, mesh)
    return jax.tree.map(functools.partial(_on, mesh), placed, shardings)


def _on(mesh: Mesh, x: Any, sharding: NamedSharding) -> Any:
    """`x`, with this sharding unless it is on the mesh already."""
    own = getattr(x, "sharding", None)
    there = isinstance(own, NamedSharding) and own.mesh == mesh
    return x if there else jax.device_put(x, sharding)


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

    return whole.map_divided(joined, state, lambda x: _target(x, whole.mesh))


def by_parameter(state: Any) -> Any:
    """A traced state, or one in its structure, with entries by parameter in place of stacks."""

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


def _split(like: Any, state: Any, views: list[list[Stack]]) -> dict[str, Any]:
    """The arrays of a state by path, with an entry per parameter in place of each stack.

    Args:
      like: the state of one device; its matrix views have the places of those of `state`.
      state: a state with stacks, in any containers.
      views: the stacks of each of its matrix views.

    Raises:
      ValueError: if there are more or fewer matrix views, or an array is not one of its stack.
    """
    nodes = jax.tree_util.tree_leaves_with_path(like, is_leaf=is_view)
    places = [place_of((*path, INNER)) for path, node in nodes if is_view(node)]
    if len(places) != len(views):
        raise ValueError(
            f"description: it has the stacks of {len(views)} matrix views, and this optimizer has "
            f"{len(places)}."
        )
    stacks = {
        f"{place}/{stack.key}": (place, stack)
        for place, view in zip(places, views, strict=True)
        for stack in view
    }
    # A path may go on with "/" in two of them: the longer one is its stack's.
    ordered = sorted(stacks, key=len, reverse=True)
    found = {}
    for name, x in named_leaves(state).present().items():
        start = next((s for s in ordered if name == s or name.startswith(f"{s}/")), None)
        if start is None:
            found[name] = x
        else:
            place, stack = stacks[start]
            rest = name.removeprefix(start)
            for parameter, part in stack.slices():
                found[f"{place}/{parameter}{rest}"] = _part(x, place=part, of=stack)
    return found


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
    if jnp.ndim(x) == 0:
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
    return own.rebuild({name: _as_array(arrays[name], x) for name, x in own.present().items()})


def _as_array(x: Any, like: Any) -> Any:
    """`x`, as an array if it is a Python number, which some files have for arrays without axes."""
    return x if hasattr(x, "dtype") else jnp.asarray(x, like.dtype)


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
