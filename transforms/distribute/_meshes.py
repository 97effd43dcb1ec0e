"""Shardings: reading them, and moving arrays to others.

On a mesh with Auto axes the compiler chooses how arrays lie. With Explicit axes, JAX's default, the
sharding is part of an array's type and every transfer is written out.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental import custom_partitioning as partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._paths import named_leaves
from .._validate import OneOf, shown


def mesh_axes(mesh: Any, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the mesh axes to distribute over."""
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise ValueError(
            f"mesh must be a jax.sharding.Mesh, got {mesh!r}. (jax.sharding.get_mesh() is one "
            "within jax.set_mesh.)"
        )
    axes = mesh.axis_names if axis is None else axis_names("axis (mesh_axis)", axis)
    for name in axes:
        OneOf(mesh.axis_names).check("axis (mesh_axis)", name)
    if len(set(mesh.axis_types)) > 1:
        raise ValueError(f"mesh: its axes must be all Auto or all Explicit, got {mesh.axis_types}.")
    return axes


def mesh_and_specs(mesh: Any) -> tuple[Mesh, dict[str, P]]:
    """A mesh, and how parameters lie on it, from their shardings; or from the mesh alone."""
    shardings = {} if isinstance(mesh, Mesh) else named_leaves(mesh).present()
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings.values()):
        raise ValueError(
            "mesh must be a jax.sharding.Mesh, or the shardings of the parameters, a tree of "
            f"NamedShardings; got {mesh!r}."
        )
    meshes = {sharding.mesh for sharding in shardings.values()} or {mesh}
    if len(meshes) > 1:
        raise ValueError(
            f"mesh: the shardings must be on one mesh, got {[*map(shown_mesh, meshes)]}."
        )
    return meshes.pop(), {name: sharding.spec for name, sharding in shardings.items()}


def shown_mesh(mesh: Any) -> str:
    """A mesh, with its devices in their order if they are known."""
    if not isinstance(mesh, Mesh):
        return str(mesh)
    return f"{mesh} of the devices {shown([device.id for device in mesh.devices.flat])}"


def axis_names(argument: str, axes: Any) -> tuple[str, ...]:
    """The name of an axis, or of several, as a tuple."""
    names = (axes,) if isinstance(axes, str) else axes
    listed = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not listed or not names or len(set(names)) < len(names):
        raise ValueError(f"{argument} must be the name of an axis or of several, got {axes!r}.")
    return tuple(names)


def resharded(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`x` with the sharding `spec` on `mesh`."""
    sharding = NamedSharding(mesh, spec)
    if is_explicit(mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def along(spec: P, axes: Sequence[str]) -> P:
    """What a spec says of some mesh axes."""
    return P(*(tuple(a for a in as_axes(entry) if a in axes) for entry in spec))


def as_axes(entry: Any) -> tuple[str, ...]:
    """An entry of a spec as mesh axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def travelled(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`x` in the sharding `spec`, from any other one, or on Auto axes on the way to any other.

    XLA gathers arrays if several mesh axes leave several axes for one. So on Auto axes the last
    mesh axis moves alone, before the others (or behind them), whose place is given first.
    """
    first = {a for entry in spec for a in as_axes(entry)[:-1]}
    if first:
        others = along(spec, [*first])
        specs = {"in_specs": others, "out_specs": others}
        x = jax.shard_map(lambda x: x, mesh=mesh, axis_names=first, check_vma=False, **specs)(x)
    return resharded(x, mesh, spec)


def as_they_lie(
    work: Callable[..., Any],
    mesh: Mesh,
    axes: Sequence[str],
    rows: Any,
    arrays: Mapping[str, jax.Array],
) -> Any:
    """`work(lie, rows, arrays)` of each device, with arrays as XLA lays them on Auto axes.

    `work` gets a row of `rows` (if there are any) and a tile of each array, which lie so. Of rows
    it makes tiles of arrays like these, without rows it makes a row for each device. XLA calls it
    when it partitions the program.
    """
    on_mesh, each = functools.partial(NamedSharding, mesh), P(tuple(axes))
    back = bool(jax.tree.leaves(rows))

    def partition(_: Any, operands: Any, results: Any) -> Any:
        lie = {
            name: along(spec_of(x.sharding, x.shape, mesh), axes) for name, x in operands[1].items()
        }
        tiles = {name: on_mesh(spec) for name, spec in lie.items()}
        of_rows, of_results = jax.tree.map(lambda _: on_mesh(each), (operands[0], results))
        return mesh, functools.partial(work, lie), tiles if back else of_results, (of_rows, tiles)

    def rule(_: Any, operands: Any, results: Any) -> partitioning.SdyShardingRule:
        """Axes may be sharded independently, but tiles of results are sharded like the arrays."""
        number = itertools.count()

        def named(x: Any) -> partitioning.ArrayMapping:
            return partitioning.ArrayMapping(*(f"d{next(number)}" for _ in range(x.rank)))

        before = (*map(named, operands),)
        after = before[-len(arrays) :] if back else (*map(named, results),)
        return partitioning.SdyShardingRule(before, after)

    whole = dict.fromkeys(arrays, P())
    specs: Any = {"in_specs": (each, whole), "out_specs": whole if back else each}
    anywhere = jax.shard_map(functools.partial(work, whole), mesh=mesh, check_vma=False, **specs)
    # JAX takes no constants outside of a jit.
    asked = partitioning.custom_partitioning(jax.jit(anywhere))
    asked.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    exchanged = jax.custom_jvp(jax.jit(asked))  # without a jit JAX would ask nobody
    exchanged.defjvp(lambda primals, tangents: (asked(*primals), anywhere(*tangents)))  # linear
    return exchanged(rows, arrays)


def spec_of(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec of a sharding that XLA chose; `P()` if it divides an axis of the mesh, or pads."""
    try:
        parts = [n // part for n, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    except ValueError:  # some axis has fewer or more on a device than on another
        return P()

    def specs(parts: Sequence[int], axes: Collection[str]) -> Iterator[tuple[Any, ...]]:
        """The ways in which mesh axes make so many parts."""
        if not parts:
            yield ()
            return
        for n in range(len(axes) + 1):
            for some in itertools.permutations(axes, n):
                if math.prod(mesh.shape[a] for a in some) == parts[0]:
                    for others in specs(parts[1:], [a for a in axes if a not in some]):
                        yield some, *others

    for spec in specs(parts, [a for a in mesh.axis_names if mesh.shape[a] > 1]):
        if NamedSharding(mesh, P(*spec)).is_equivalent_to(sharding, len(shape)):
            return P(*spec)
    return P()


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether shardings on this mesh are part of types."""
    return AxisType.Explicit in mesh.axis_types


def check_on_mesh(tree: Any, mesh: Mesh) -> None:
    """Requires the leaves whose mesh is known to be on `mesh`."""
    for name, x in named_leaves(tree).present().items():
        there = getattr(sharding_of(x), "mesh", mesh)
        same = there == mesh if isinstance(there, Mesh) else there.shape_tuple == mesh.shape_tuple
        if not (same or there.empty):
            raise ValueError(
                f"{name!r} is on the mesh {shown_mesh(there)}, but mesh={shown_mesh(mesh)}: use "
                "the mesh of the parameters."
            )


def sharding_of(x: Any) -> Any:
    """The sharding of `x`; while tracing it is known on meshes with Explicit axes only."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return x.sharding if concrete else getattr(jax.typeof(x), "sharding", None)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """The sharding of `x` if its mesh has Explicit axes (JAX's default), else None."""
    sharding = sharding_of(x)
    known = isinstance(sharding, NamedSharding) and is_explicit(sharding.mesh)
    return sharding if known else None


def unsharded(tree: Any, like: Any = None) -> Any:
    """`tree` replicated on the mesh of `like` (itself by default), if that has Explicit axes.

    There JAX does not mix arrays on and off the mesh, merge sharded axes, or multiply along them.
    """
    leaves = jax.tree.leaves(tree if like is None else like)
    sharding = next(filter(None, map(explicit_sharding, leaves)), None)
    if sharding is None:
        return tree
    whole = NamedSharding(sharding.mesh, P())
    return jax.tree.map(lambda x: jax.sharding.reshard(x, whole), tree)


def sharded_like(x: jax.Array, like: Any) -> jax.Array:
    """`x` with the sharding of `like`, if its mesh has Explicit axes."""
    sharding = explicit_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)
