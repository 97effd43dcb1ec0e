"""Arrays on meshes: where they lie, and how they get to lie elsewhere.

With Auto axes the compiler decides on transfers, within what it is asked for. With Explicit axes,
JAX's default, the sharding is part of an array's type, and every transfer is spelled out.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._paths import named_leaves


def put(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`x` with this sharding."""
    sharding = NamedSharding(mesh, spec)
    if is_explicit(mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def cut_by_columns(x: jax.Array, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """`x` cut along its last axis among the devices of some mesh axes; whole if they do not divide.

    This is how matrices travel: from whole arrays it costs nothing, and between it and a cut along
    any other axis devices exchange what they own, no more.
    """
    divides = x.shape[-1] % math.prod(mesh.shape[a] for a in axes) == 0
    return put(x, mesh, P(*[None] * (x.ndim - 1), axes) if divides else P())


def is_explicit(mesh: Mesh) -> bool:
    """Whether shardings on this mesh are part of types."""
    return AxisType.Explicit in mesh.axis_types


def check_on_mesh(tree: Any, mesh: Mesh | None) -> None:
    """Requires leaves whose mesh is known to be on the given one, if one is given.

    Raises:
      ValueError: naming the parameter and both meshes.
    """
    if mesh is None:
        return
    for name, x in named_leaves(tree).present().items():
        there = getattr(sharding_of(x), "mesh", mesh)
        same = there == mesh if isinstance(there, Mesh) else there.shape_tuple == mesh.shape_tuple
        if not (same or there.empty):
            raise ValueError(
                f"{name!r} lies on the mesh {there}, but mesh= is {mesh}: give that of parameters."
            )


def sharding_of(x: Any) -> Any:
    """What is known of where `x` lies; while tracing, on meshes with Explicit axes alone."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return x.sharding if concrete else getattr(jax.typeof(x), "sharding", None)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """The sharding of `x` if its mesh has Explicit axes (JAX's default), else None."""
    sharding = sharding_of(x)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return sharding
    return None


def is_cut(x: Any) -> bool:
    """Whether `x` is known to be divided among the devices of a mesh with Explicit axes."""
    sharding = explicit_sharding(x)
    return sharding is not None and not sharding.is_fully_replicated


def unsharded(x: Any) -> Any:
    """`x` on every device, if its mesh has Explicit axes.

    There JAX refuses to merge axes that are cut, or to multiply along them.
    """
    x = jnp.asarray(x)
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P()))


def on_mesh_of(gradients: dict[str, jax.Array], state: Any) -> Any:
    """A state on the mesh of the gradients: one made without may not meet an Explicit one."""
    sharding = next(filter(None, map(explicit_sharding, gradients.values())), None)
    if sharding is None:
        return state
    whole = NamedSharding(sharding.mesh, P())
    return jax.tree.map(lambda x: jax.sharding.reshard(x, whole), state)


def sharded_like(x: jax.Array, like: Any) -> jax.Array:
    """`x` as `like` lies, if its mesh has Explicit axes."""
    sharding = explicit_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)
