"""Where an optimizer's state is: its sharding, and the hosts' memory between steps."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._paths import is_box, is_hole, named_leaves
from .._validate import as_transformation
from ..distribute._distribute import Division
from ..distribute._meshes import is_explicit, shown_mesh
from ._entries import Entry, entries_in
from ._traced import traced

SMALL = 1024
"""Arrays of at most so many elements stay in device memory: a transfer would cost more."""


def state_sharding(
    optimizer: Any, params: Any, mesh: Mesh, *, memory_kind: str | None = None
) -> Any:
    """The sharding of every array of an optimizer's state.

    Parts that the optimizer distributes (`mesh=`) are sharded along their first axes; copies of the
    parameters, such as AdamW's moments, are sharded like them; everything else is replicated. (On a
    mesh with Explicit axes the state of matrices without `mesh=` is replicated too.)

    Args:
      optimizer: any Optax transformation.
      params: parameters, or their shapes with shardings (`jax.ShapeDtypeStruct(…, sharding=…)`), or
        shapes in Flax's `nn.Partitioned`, whose names are axes of the mesh.
      mesh: the mesh of the parameters.
      memory_kind: of arrays with more than 1024 elements; by default the devices' own. With
        "pinned_host" they are in the hosts' memory, for an optimizer in `curvax.state_on_host`.

    Returns:
      A tree of `NamedSharding` with the structure of `optimizer.init(params)`, for `jax.jit`
      (`out_shardings=` of `init` and of the step), `jax.device_put` and Orbax.

    Raises:
      ValueError: if a parameter or a distributed part of the state is on another mesh, or a box
        names an axis that the mesh lacks; if the devices have no memory of this kind.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> optimizer = curvax.muon(0.02, mesh=mesh)
      >>> shardings = curvax.state_sharding(optimizer, params, mesh)
      >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh)}.")
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if memory_kind not in (None, *kinds):
        raise ValueError(
            f"memory_kind must be one of {kinds}, the memories of {device.device_kind!r}, "
            f"got {memory_kind!r}."
        )
    placed = {}
    for name, leaf in named_leaves(_without_boxes(params, mesh)).present().items():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            if sharding.mesh != mesh:
                there, here = shown_mesh(sharding.mesh), shown_mesh(mesh)
                raise ValueError(f"the parameter {name!r} is on {there}, not on {here}.")
            placed[name] = (tuple(leaf.shape), sharding)
    replicated = NamedSharding(mesh, P())

    def of_copy(entry: Entry) -> NamedSharding:
        in_stack = any(place is not None for _, place in entry.owners)
        if len(entry.owners) != 1 or (in_stack and is_explicit(mesh)):
            return replicated
        shape, sharding = placed.get(entry.owners[0][0], (None, replicated))
        return sharding if shape == tuple(entry.leaf.shape) else replicated

    def of_part(_: Any, division: Division) -> Any:
        if division.mesh != mesh:
            there, here = shown_mesh(division.mesh), shown_mesh(mesh)
            raise ValueError(f"the optimizer distributes its state over {there}, not over {here}.")
        return shardings_of(division)

    def spelled(x: Any, sharding: NamedSharding) -> NamedSharding:
        if mesh.are_all_axes_explicit:
            # As JAX spells that of a result: another spelling would compile a step twice.
            spec = P(*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
            sharding = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        if memory_kind is None or x.size <= SMALL:
            return sharding
        return sharding.with_memory_kind(memory_kind)

    whole = traced(optimizer, params)
    copies = [of_copy(entry) for entry in entries_in(whole, params)]
    shardings = jax.tree.unflatten(jax.tree.structure(whole.undivided), copies)
    return jax.tree.map(spelled, whole.state, whole.map_divided(of_part, shardings))


def shardings_of(division: Division) -> Any:
    """The sharding of each array of a part of the state that is distributed over a mesh."""
    mesh: Any = division.mesh
    specs = division.layout.specs(division.axes)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _without_boxes(params: Any, mesh: Mesh) -> Any:
    """The parameters; where a box of Flax says their sharding, as shapes with this sharding."""

    def opened(node: Any) -> Any:
        x = node.value if is_box(node) else node
        if x is node or is_hole(x) or isinstance(getattr(x, "sharding", None), NamedSharding):
            return node
        spec = P(*node.get_partition_spec())
        lacking = {*jax.tree.leaves(tuple(spec))} - {*mesh.axis_names}
        if lacking:
            raise ValueError(
                f"params: a box names the axes {spec}, and the mesh has {mesh.axis_names}. Give "
                "parameters, or shapes, that have shardings: nn.logical_to_mesh_sharding makes "
                "these from logical names."
            )
        sharding = NamedSharding(mesh, spec)
        return node.replace_boxed(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))

    return jax.tree.map(opened, params, is_leaf=lambda x: is_box(x) or is_hole(x))


def state_on_host(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is in the hosts' memory between steps.

    Its state is that of `optimizer`. Place it with `state_sharding(…, memory_kind="pinned_host")`:
    each update fetches the arrays that are in host memory and sends the new ones back. Small arrays
    stay on the devices.

    An ordinary step fetches the whole state, and saves its memory during the forward and backward
    pass. With `curvax.layerwise` only the state of one layer is on the devices at a time. In both
    cases the state crosses the bus twice in a step: use it where the state does not fit.

    Args:
      optimizer: any Optax transformation, with or without `mesh=`.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("devices",))
      >>> params = {"kernel": jnp.ones((64, 32))}
      >>> optimizer = curvax.state_on_host(curvax.muon(0.02))
      >>> places = curvax.state_sharding(optimizer, params, mesh, memory_kind="pinned_host")
      >>> state = jax.jit(optimizer.init, out_shardings=places)(params)
      >>> step = jax.jit(optimizer.update, out_shardings=(None, places), donate_argnums=1)
      >>> updates, state = step(params, state, params)
    """
    inner = as_transformation("optimizer", optimizer)
    # The memory of an array is a part of its type, also in a loop over layers.
    space_of = lambda x: jax.typeof(x).memory_space  # noqa: E731

    def moved(x: Any, space: Any) -> Any:
        return x if space_of(x) == space else jax.device_put(x, space)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        near = jax.tree.map(lambda x: moved(x, jax.memory.Space.Device), state)
        updates, new = inner.update(updates, near, params, **extra_args)
        return updates, jax.tree.map(lambda x, old: moved(x, space_of(old)), new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
