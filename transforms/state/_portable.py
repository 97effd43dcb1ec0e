"""The portable form of a state, for checkpoints: by parameter, without stacks and meshes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from .._own_state import arrays_in, difference, kinds_of
from .._paths import named_leaves
from ..distribute._distribute import Division
from ._format import stacks_in
from ._sharding import shardings_of, state_sharding
from ._traced import Stack, Traced, by_parameter, by_stack, is_view, place_of, traced


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
    joined = whole.undivided
    if description is not None:
        portable = _split(joined, portable, stacks_in(description))
    portable = in_structure("portable", by_parameter(joined), portable)
    stacked = by_stack(joined, portable)

    def divided(node: Any, division: Division) -> Any:
        mesh = _mesh_of(division)
        return _moved(division.layout.divided, node, shardings_of(division), mesh)

    def placed(x: Any, sharding: NamedSharding) -> Any:
        current = getattr(x, "sharding", None)
        there = isinstance(current, NamedSharding) and current.mesh == whole.mesh
        return x if there else jax.device_put(x, sharding)

    state = whole.map_divided(divided, stacked)
    if whole.mesh is None:
        return state
    return jax.tree.map(placed, state, state_sharding(optimizer, params, whole.mesh))


def joined_state(whole: Traced, state: Any) -> Any:
    """The state of one device: stacks as they are, nothing distributed."""
    state = in_structure("state", whole.state, state)

    def undivided(node: Any, division: Division) -> Any:
        shapes, mesh = division.layout.joined_shapes, _mesh_of(division)
        devices = math.prod(mesh.shape[a] for a in division.axes)

        def sharding(x: Any) -> NamedSharding:
            """Over the first axis but that of matrices that the devices divide."""
            axis = next((i for i in range(1, x.ndim) if x.shape[i] % devices == 0), None)
            return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, division.axes))

        shardings = jax.tree.map(sharding, shapes)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(node)):
            return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
        return _moved(division.layout.undivided, node, shardings, mesh)

    return whole.map_divided(undivided, state, lambda x: _target(x, whole.mesh))


def _split(like: Any, state: Any, views: list[list[Stack]]) -> dict[str, Any]:
    """The arrays of a state like `like` by path, with entries by parameter for these stacks."""
    nodes = jax.tree_util.tree_leaves_with_path(like, is_leaf=is_view)
    places = [place_of((*path, GetAttrKey("inner"))) for path, node in nodes if is_view(node)]
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
    by_path = {}
    for name, x in named_leaves(state).present().items():
        # A path may go on with "/" in two of them: the longer one is its stack's.
        start = max((s for s in stacks if f"{name}/".startswith(f"{s}/")), key=len, default=None)
        if start is None:
            by_path[name] = x
            continue
        place, stack = stacks[start]
        for parameter, part in stack.slices():
            by_path[f"{place}/{parameter}{name.removeprefix(start)}"] = stack.part(x, part)
    return by_path


def in_structure(
    argument: str, like: Any, tree: Any, made_for: str = "these parameters", *, dtypes: bool = True
) -> Any:
    """The arrays of `tree` in the containers of `like`, by their paths."""
    # A state in an `nnx.Optimizer` has every array in a box, and a checkpoint restored without a
    # target has dicts and lists for tuples, and strings for numbers.
    named = named_leaves(like)
    arrays = arrays_in(tree, named.names)
    expected, kinds = map(kinds_of, (named.present(), arrays))
    message = difference(argument, expected, kinds, made_for, dtypes=dtypes)
    if message is not None:
        raise ValueError(message)

    def as_array(x: Any, like: Any) -> Any:  # some files have numbers for arrays without axes
        return x if hasattr(x, "dtype") else jnp.asarray(x, like.dtype)

    return named.rebuild({name: as_array(arrays[name], x) for name, x in named.present().items()})


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
    return x.update(sharding=NamedSharding(mesh, spec))


def _moved(f: Callable[[Any], Any], tree: Any, shardings: Any, mesh: Mesh) -> Any:
    """`f(tree)` with these shardings; the compiler chooses the transfers."""
    # Explicit axes would require spelling out every transfer; Auto axes copy nothing.
    auto = Mesh(mesh.devices, mesh.axis_names)

    def placed(x: Any) -> Any:
        current: Any = getattr(x, "sharding", None)
        there = isinstance(current, NamedSharding) and current.mesh.shape == mesh.shape
        return jax.device_put(x, NamedSharding(auto, current.spec if there else P()))

    there = jax.tree.map(lambda s: NamedSharding(auto, s.spec), shardings)
    done = jax.jit(f, out_shardings=there)(jax.tree.map(placed, tree))
    return jax.device_put(done, shardings)
