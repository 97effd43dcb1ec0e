"""Meshes of every kind, maps, Optax's wrappers around, and what is refused."""

import functools
import math
from collections.abc import Callable
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
from tests.helpers import assert_close, run_scanned, stacked, trajectory
from tests.registry import NAMED, REGISTRY, Row
from tests.shared.meshes import (
    ONE_SHAPE,
    TWO_SHAPES,
    as_on_one_device,
    assert_same_arrays,
    begun,
    copied,
    divided_arrays,
    entries,
    explicit_by_default,
    given,
    mesh_of,
    of_matrices,
    on,
    on_no_mesh,
    steps,
)
from tests.shared.wrong_calls import assert_refused, wrong_calls


def other_meshes() -> dict[str, tuple[Mesh, Any]]:
    """Meshes, and the axes among whose devices matrices are divided."""
    reversed_ones = Mesh(np.array(jax.devices())[:3:-1], "x", axis_types=(AxisType.Auto,))
    return {
        "one Explicit axis of two": (mesh_of("explicit", 2, 4), "y"),
        "two axes of three, in another order": (mesh_of("auto", 2, 2, 2), ["z", "x"]),
        "some devices, in another order": (reversed_ones, None),
        "one device": (mesh_of("auto", 1), None),
    }


@pytest.mark.parametrize("name", cells(other_meshes(), of=4))
def test_any_axes_of_any_mesh(name: str) -> None:
    mesh, axes = other_meshes()[name]
    params, gradients = given(TWO_SHAPES)
    optimizer = NAMED["muon"].make(mesh=mesh, mesh_axis=axes)
    params = on(mesh, params)
    updates, state = steps(optimizer, [on(mesh, g) for g in gradients], params, mesh)
    assert_close(updates, on_no_mesh("muon")[0], NAMED["muon"].growth)
    if "order" in name:
        portable = curvax.portable_state(optimizer, params, state)
        assert_same_arrays(curvax.place_state(optimizer, params, portable), state)
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    number = math.prod(mesh.shape[name] for name in names)
    assert {
        len({str(i) for i in x.sharding.devices_indices_map(x.shape).values()})
        for x in divided_arrays(state)
        if x.ndim
    } == {number}


@explicit_by_default
def test_inside_the_context_of_a_mesh(kind: str) -> None:
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        updates, _ = steps(NAMED["muon"].make(mesh=mesh), gradients, params, mesh)
    assert_close(updates, on_no_mesh("muon")[0], NAMED["muon"].growth)


def test_inside_pmap() -> None:
    """Where a device's state is its own alone."""
    params, gradients = given(TWO_SHAPES)
    optimizer, devices = NAMED["muon"].make(mesh_axis="x"), jax.devices()[:4]
    each = lambda tree: jax.tree.map(lambda x: np.stack([x] * 4), tree)  # noqa: E731
    state = jax.pmap(optimizer.init, axis_name="x", devices=devices)(each(params))
    step = jax.pmap(optimizer.update, axis_name="x", devices=devices)
    for gradient, expected in zip(gradients, on_no_mesh("muon")[0], strict=True):
        updates, state = step(each(gradient), state, each(params))
        updates = jax.tree.map(np.asarray, updates)
        for device in range(4):
            own = jax.tree.map(lambda x: x[device], updates)  # noqa: B023
            assert_close(own, expected, NAMED["muon"].growth)
    divided = entries(state, "even") + entries(state, "dealt")
    moments = {x.shape for x in divided if x.ndim > 1 and x.dtype == jnp.float32}
    assert moments == {(4, 1, 4, 6), (4, 1, 24)}  # on each a wide matrix and one that was left


@explicit_by_default
def test_inside_shard_map(kind: str) -> None:
    """Over two axes, in an order of their own."""
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of(kind, 2, 2)
    optimizer = NAMED["muon"].make(mesh_axis=("y", "x"))
    directions = lambda *given: trajectory(optimizer)(*given)[0]  # noqa: E731
    mapped = jax.shard_map(directions, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    updates = jax.jit(mapped)(on(mesh, stacked(gradients)), on(mesh, params))
    assert_close(updates, stacked(on_no_mesh("muon")[0]), NAMED["muon"].growth)


@explicit_by_default
def test_a_donated_state_is_used_and_nothing_is_compiled_twice(kind: str) -> None:
    """A state that could not be used would be a warning, and so an error."""
    optimizer, params, gradients, state = begun("muon", kind, 4)
    traces, updates = [], []

    def update(*arguments: Any) -> Any:
        traces.append(None)
        return optimizer.update(*arguments)

    shardings = curvax.state_sharding(optimizer, params, mesh_of(kind))
    state = first = copied(state)
    step = jax.jit(update, donate_argnums=1, out_shardings=(None, shardings))
    for gradient in gradients:
        new, state = step(gradient, state, params)
        updates.append(new)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert len(traces) == 1 and step._cache_size() == 1
    assert_close(updates, on_no_mesh("muon")[0], NAMED["muon"].growth)


@explicit_by_default
def test_init_without_jit_and_with_uncommitted_parameters(kind: str) -> None:
    """Arrays that were not put anywhere; the divided part is compiled once."""
    (params, gradients), muon = given(ONE_SHAPE), NAMED["muon"].make_direction()
    optimizer = curvax.on_matrices(muon, mesh=mesh_of(kind))
    step, state = jax.jit(optimizer.update), optimizer.init(params)
    for gradient in gradients:
        updates, state = step(gradient, state, params)
    assert step._cache_size() == 1
    expected = run_scanned(curvax.on_matrices(muon), gradients, params)[0][-1]
    assert_close(updates, expected, NAMED["muon"].growth)


@explicit_by_default
def test_steps_can_be_scanned(kind: str) -> None:
    optimizer, params, gradients, state = begun("muon", kind, 4)

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return state, updates

    together = on(mesh_of(kind), stacked(gradients))
    _, updates = jax.jit(lambda *args: jax.lax.scan(step, *args))(state, together)
    assert_close(updates, stacked(on_no_mesh("muon")[0]), NAMED["muon"].growth)


def injected(row: Row, **mesh: Any) -> Any:
    inject = optax.inject_hyperparams(row.optimizer, static_args=(*row.static, "mesh"))
    return inject(0.1, **row.for_contract(), **mesh)


def composed(row: Row, **mesh: Any) -> Any:
    mask = {key: key != "3/kernel" for key in TWO_SHAPES}
    chained = optax.chain(optax.scale(2.0), optax.masked(row.make(**mesh), mask))
    return optax.apply_if_finite(optax.MultiSteps(chained, 2).gradient_transformation(), 2)


@pytest.mark.parametrize(
    ("name", "wrapped", "shapes", "kind"),
    [("eigen_adam", injected, ONE_SHAPE, "auto"), ("muon", composed, TWO_SHAPES, "explicit")],
)
def test_inside_of_optax(name: str, wrapped: Callable[..., Any], shapes: Any, kind: str) -> None:
    make = functools.partial(wrapped, NAMED[name])
    as_on_one_device(make, *given(shapes, 4), mesh_of(kind), NAMED[name].growth)


def test_traced_numbers_on_explicit_axes_are_refused() -> None:
    params, gradients = given(TWO_SHAPES)
    mesh = mesh_of("explicit")
    optimizer = injected(NAMED["muon"], mesh=mesh)
    with pytest.raises(ValueError, match="mesh: .* must not be tracers.* schedules to b1"):
        steps(optimizer, [on(mesh, g) for g in gradients], on(mesh, params), mesh)


MESH, OTHER, PARAMS = mesh_of(), mesh_of("auto", 8), given(TWO_SHAPES)[0]
FIVE = {f"{i}/kernel": jnp.ones((4, 6)) for i in range(5)}
CODED = curvax.quantize_state(curvax.scale_by_muon(), block=4, min_elements=80)
HALF_EXPLICIT = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
SEVERAL = {name: NamedSharding(mesh_of("auto", n), P()) for name, n in (("a", 2), ("b", 4))}
BLOCKS = curvax.MatrixRule(block_size=3)
POLAR = curvax.orthogonalize()
TURNED = optax.stateless(lambda g, _: jax.tree.map(jnp.matrix_transpose, g))
ELSEWHERE = {"params/kernel": NamedSharding(MESH, P("x"))}
muon, shampoo, alice = (NAMED[name].make for name in ("muon", "shampoo", "alice"))


def moved(source: Any, target: Any) -> Any:
    """The state of an optimizer for another one."""
    state = jax.eval_shape(source.init, PARAMS)
    return curvax.place_state(target, PARAMS, curvax.portable_state(source, PARAMS, state))


def first_step(optimizer: Any, params: Any = PARAMS, gradients: Any = None) -> Any:
    state, gradients = jax.eval_shape(optimizer.init, params), gradients or params
    return jax.eval_shape(lambda g, s: optimizer.update(g, s, params), gradients, state)


@wrong_calls("""
muon(mesh=MESH, mesh_axis='model') -> mesh_axis | 'x' | 'model'
muon(mesh=MESH, mesh_axis=0) -> axis | 0
muon(mesh=MESH, mesh_axis=()) -> axis
muon(mesh=MESH, mesh_axis=('x', 'x')) -> axis | 'x'
muon(mesh=MESH.abstract_mesh) -> mesh must be
muon(mesh=jax.sharding.get_mesh()) -> mesh must be | Mesh( | set_mesh
muon(mesh=HALF_EXPLICIT) -> all Auto or all Explicit
muon(mesh=SEVERAL) -> mesh | one mesh
curvax.distribute(POLAR, MESH, axis_name='x') -> axis_name='x'
curvax.distribute(POLAR, axis='x') -> axis='x' needs
curvax.distribute(POLAR) -> mesh | axis_name
muon(mesh_axis='x').init(PARAMS) -> 'x' is not an axis
# A rule that asks for the size of a stack, and codes around a divided state
curvax.assemble(CODED, 0.1, mesh=MESH).init(FIVE) -> depends on the number of matrices
curvax.quantize_state(muon(mesh=MESH)).init(PARAMS) -> quantize_state | mesh=
# Gradients, shardings and directions that do not fit
jax.jit(muon(mesh=MESH).update)(on(OTHER, PARAMS), muon(mesh=MESH).init(PARAMS)) ->
    '0/kernel' is on the mesh
first_step(muon(mesh=ELSEWHERE), {'kernel': jnp.ones((4, 8))}) ->
    mesh: | none for 'kernel' | params/kernel
# Of matrices that are divided evenly, and of those that are left
first_step(curvax.on_matrices(TURNED, mesh=MESH), dict(list(FIVE.items())[:4])) ->
    '4x6' must have the shape of their gradient
first_step(curvax.on_matrices(TURNED, mesh=MESH), dict(list(FIVE.items())[:3])) ->
    '4x6' must have the shape of their gradient
# States
moved(alice(mesh=MESH), alice(mesh=MESH, rank=2)) -> portable | basis | 2
moved(shampoo(mesh=MESH), shampoo(mesh=MESH, matrices=BLOCKS)) -> portable | blocks
curvax.place_state(muon(mesh=MESH), PARAMS, jax.eval_shape(muon(mesh=MESH).init, PARAMS)) ->
    portable
curvax.state_of(muon(mesh=MESH), PARAMS, muon().init(PARAMS), '0/kernel') -> state has
curvax.state_sharding(muon(mesh=MESH), PARAMS, OTHER) -> Mesh | 'x': 4 | 'x': 8
curvax.state_sharding(muon(), on(OTHER, PARAMS), MESH) -> '0/kernel' is on
curvax.state_sharding(muon(), PARAMS, 'x') -> mesh must be
""")
def test_bad_input_is_named(call: str, fragments: str) -> None:
    assert_refused(call, fragments, globals())


@pytest.mark.parametrize("spec", [P(), P(None, "x")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_a_step_compiled_ahead_of_time_takes_its_own_state(row: Row, spec: P) -> None:
    """On Explicit axes without `mesh=`, the first state is sharded like those of later steps."""
    assert_takes_its_own_state(row.make(), spec)


@pytest.mark.parametrize("storage", cells([curvax.cholesky, curvax.packed], of=2))
def test_few_bits_on_explicit_axes(storage: Any) -> None:
    """The loops of their decompositions and reflectors."""
    assert_takes_its_own_state(curvax.soap(1e-3, storage=storage(min_elements=1)), P())


def assert_takes_its_own_state(optimizer: Any, spec: P) -> None:
    mesh = mesh_of("explicit")
    params = on(mesh, given({"dense/kernel": (4, 8), "dense/bias": (8,)})[0])
    kernel = jax.device_put(params["dense/kernel"], NamedSharding(mesh, spec))
    params["dense/kernel"] = kernel
    state = optimizer.init(params)
    step = jax.jit(optimizer.update).lower(params, state, params).compile()
    updates, after = step(params, state, params)
    assert updates["dense/kernel"].sharding.is_equivalent_to(kernel.sharding, 2)
    step(params, after, params)
    for x, y in zip(*map(jax.tree.leaves, map(of_matrices, (state, after))), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
