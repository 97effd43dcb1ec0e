"""States in host memory: the same numbers, and where the arrays are."""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import curvax
from tests.cells import cells
from tests.helpers import normal_like
from tests.shared.meshes import mesh_of, on

PARAMS = {
    "up": {"kernel": jnp.ones((40, 64))},
    "down": {"kernel": jnp.ones((64, 40))},
    "norm": {"scale": jnp.ones(8)},
}


def kinds_of(state: Any) -> dict[str, list[Any]]:
    """The memories that large and small arrays of a state are in."""
    found: dict[str, list[Any]] = {"large": [], "small": []}
    for x in jax.tree.leaves(state):
        found["large" if x.size > 1024 else "small"].append(x.sharding.memory_kind)
    return found


@pytest.mark.parametrize("devices", cells([4, 1], of=2))
def test_steps_with_a_state_on_the_host_are_the_same(devices: int) -> None:
    mesh = mesh_of("auto", devices)
    plain = curvax.muon(0.1, mesh=mesh)
    optimizer = curvax.state_on_host(plain)
    params = on(mesh, PARAMS)
    places = curvax.state_sharding(optimizer, params, mesh, memory_kind="pinned_host")
    state = jax.jit(optimizer.init, out_shardings=places)(params)
    expected = jax.jit(plain.init)(params)
    step = jax.jit(optimizer.update, out_shardings=(None, places))
    plain_step = jax.jit(plain.update)
    for t in range(3):
        gradient = on(mesh, normal_like(jax.random.key(t), PARAMS))
        update, state = step(gradient, state, params)
        other, expected = plain_step(gradient, expected, params)
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), update, other))
    kinds = kinds_of(state)
    assert set(kinds["large"]) == {"pinned_host"}
    assert set(kinds["small"]) == {"device"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(update)} == {"device"}


def test_layerwise_fetches_the_state_of_one_layer() -> None:
    mesh, number = mesh_of("auto", 1), 5
    axes = {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    layers = {"a": {"kernel": jax.random.normal(jax.random.key(0), (number, 40, 40)) / 6}}
    plain = curvax.muon(0.1, weight_dimension_numbers=axes)
    optimizer = curvax.state_on_host(plain)
    x = jnp.ones((3, 40))

    def step(optimizer: Any, layers: Any, state: Any) -> Any:
        block = lambda p, x: jnp.tanh(x @ p["a"]["kernel"])  # noqa: E731
        y, backward = curvax.layerwise(block, optimizer, layers, state, x)
        return backward(y)[:2]

    places = curvax.state_sharding(optimizer, layers, mesh, memory_kind="pinned_host")
    state = jax.jit(optimizer.init, out_shardings=places)(layers)
    run = jax.jit(functools.partial(step, optimizer), out_shardings=(None, places))
    fetched = transfers(run.trace(layers, state).jaxpr, jax.memory.Space.Device)
    assert fetched == [(1, 40, 40)] * len(fetched) and fetched
    new, state = run(layers, state)
    expected, _ = jax.jit(functools.partial(step, plain))(layers, jax.jit(plain.init)(layers))
    assert (new["a"]["kernel"] == expected["a"]["kernel"]).all()
    assert set(kinds_of(state)["large"]) == {"pinned_host"}


def transfers(jaxpr: Any, target: Any) -> list[tuple[int, ...]]:
    """Shapes of the arrays that a program sends to a memory, those in loops and branches too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put" and equation.params["devices"][0] == target:
            found += [x.aval.shape for x in equation.invars]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += transfers(inner, target)
    return found
