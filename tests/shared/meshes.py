"""Meshes, parameters on them, and the steps of methods there and on one device."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, normal, run_scanned
from tests.registry import NAMED

STEPS = 3
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
both_axis_types = pytest.mark.parametrize("kind", AXIS_TYPES)
explicit_by_default = pytest.mark.parametrize("kind", cells(["explicit", "auto"], of=2))


# Two shapes: on four devices one matrix each, and a round of two tall ones and a wide one.
TWO_SHAPES = {**{f"{i}/kernel": (4, 6) for i in range(5)}, "a/bias": (6,)}
TWO_SHAPES |= {"tall/kernel": (6, 4), "taller/kernel": (6, 4)}


ONE_SHAPE = {f"{i}/kernel": (4, 6) for i in range(5)}
ADAMW = functools.partial(optax.adamw, weight_decay=0.1)


@functools.cache
def mesh_of(kind: str = "auto", *shape: int) -> Mesh:
    """The first devices, four of them by default."""
    shape = shape or (4,)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple("xyz"[: len(shape)]), axis_types=(AXIS_TYPES[kind],) * len(shape))


def on(mesh: Mesh, tree: Any, specs: Mapping[str, P] | None = None) -> Any:
    """A copy of a tree of parameters on a mesh; whole on every device by default."""
    if specs is None:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), NamedSharding(mesh, P())), tree)
    return {
        k: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[k])) for k, x in tree.items()
    }


def begin(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    return jax.jit(optimizer.init, out_shardings=curvax.state_sharding(optimizer, params, mesh))(
        params
    )


def steps(optimizer: Any, gradients: Any, params: Any, mesh: Mesh) -> tuple[list[Any], Any]:
    """Updates of every step on a mesh, and the last state."""
    # On Auto axes the compiler chooses the shardings that the caller does not give.
    is_auto = AxisType.Explicit not in mesh.axis_types
    kept = (None, curvax.state_sharding(optimizer, params, mesh)) if is_auto else None
    step = jax.jit(optimizer.update, out_shardings=kept)
    state, updates = begin(optimizer, params, mesh), []
    for gradient in gradients:
        update, state = step(gradient, state, params)
        updates.append(update)
    # On a mesh of one device JAX gives shardings another name.
    assert mesh.size == 1 or step._cache_size() == 1  # pyright: ignore
    return updates, state


def jitted(optimizer: Any) -> Any:
    """The same optimizer, its first state from one program."""
    return optax.GradientTransformationExtraArgs(jax.jit(optimizer.init), optimizer.update)


def given(shapes: Mapping[str, tuple[int, ...]], number: int = STEPS) -> tuple[Any, list[Any]]:
    params = normal(jax.random.key(1), shapes)
    return params, gradients_like(params, number)


def cast(tree: Any, dtypes: Mapping[str, str]) -> Any:
    """Parameters in other dtypes, by name; float32 by default."""
    return {k: np.asarray(x).astype(jnp.dtype(dtypes.get(k, "float32"))) for k, x in tree.items()}


@functools.cache
def on_no_mesh(name: str) -> tuple[list[Any], list[Any]]:
    """Updates and states of a method for `TWO_SHAPES`."""
    params, gradients = given(TWO_SHAPES)
    return run_scanned(NAMED[name].make(), gradients, params)


@functools.cache
def begun(name: str, kind: str, *shape: int) -> tuple[Any, Any, Any, Any]:
    """A method on a mesh: itself, its parameters `TWO_SHAPES`, gradients and the first state."""
    mesh = mesh_of(kind, *shape)
    optimizer = NAMED[name].make(mesh=mesh)
    params, gradients = on(mesh, given(TWO_SHAPES))
    return optimizer, params, gradients, begin(optimizer, params, mesh)


def copied(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)


def of_matrices(state: Any) -> Any:
    """The part of a full optimizer's state that is divided, or would be."""
    return state.inner_states["matrices"]


def divided_arrays(state: Any) -> list[Any]:
    """The arrays of the divided parts of a state."""
    from curvax.transforms.distribute._layout import is_divided

    nodes = filter(is_divided, jax.tree.leaves(state, is_leaf=is_divided))
    return jax.tree.leaves(list(nodes))


def shapes_and_dtypes(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) for x in leaves]


def entries(state: Any, field: str) -> list[Any]:
    """The leaves of a state below fields of this name."""
    return [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if jax.tree_util.GetAttrKey(field) in path
    ]


def assert_same_arrays(one: Any, other: Any) -> None:
    """The same structure, numbers bit for bit, and shardings."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def as_on_one_device(
    make: Any,
    params: Any,
    gradients: list[Any],
    mesh: Mesh,
    factor: float,
    specs: Any = None,
    states: bool = False,
) -> tuple[Any, Any, list[Any], Any]:
    """Compares updates of what `make` makes with `mesh=` and without, and if asked the last states.

    Returns the optimizer on the mesh, its parameters, updates and last state.
    """
    optimizer, placed, alone = make(mesh=mesh), on(mesh, params, specs), make()
    updates, state = steps(optimizer, [on(mesh, g, specs) for g in gradients], placed, mesh)
    expected, (*_, last) = run_scanned(alone, gradients, params)
    assert_close(updates, expected, factor)
    portable = curvax.portable_state(optimizer, placed, state)
    on_one = curvax.portable_state(alone, params, last)
    if states:
        assert_close(portable, on_one, factor)
    assert shapes_and_dtypes(portable) == shapes_and_dtypes(on_one)
    keys = entries(portable, "key"), entries(on_one, "key")
    assert all(map(np.array_equal, *keys))  # the same draws
    again = curvax.place_state(optimizer, placed, portable)
    assert_close(curvax.portable_state(optimizer, placed, again), portable, 0)
    return optimizer, placed, updates, state


def abstract(shapes: Mapping[str, tuple[int, ...]], sharding: Any) -> dict[str, Any]:
    return {k: jax.ShapeDtypeStruct(s, "float32", sharding=sharding) for k, s in shapes.items()}


def abstract_state(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    """The shapes of the state and its shardings on a mesh."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        curvax.state_sharding(optimizer, params, mesh),
    )
