"""A mesh alone on Auto axes, where XLA says how arrays lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from curvax.transforms.distribute import _meshes
from curvax.transforms.distribute._step import OnMesh
from tests.cells import cells
from tests.helpers import assert_close
from tests.shared.layouts import LAYOUTS, cost_of, optimizer_of
from tests.shared.meshes import as_on_one_device, mesh_of
from tests.shared.meshes import given as gradients_of

SMALL = curvax.polar.newton_schulz(2)


@given(st.permutations("xyz"), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_the_spec_of_a_sharding(order: list[str], places: list[int]) -> None:
    """Each mesh axis is along one of three axes, or along none."""
    mesh = mesh_of("auto", 2, 2, 2)
    entries: list[list[str]] = [[], [], [], []]
    for axis, place in zip(order, places, strict=True):
        entries[place].append(axis)
    sharding = NamedSharding(mesh, P(*map(tuple, entries[:3])))
    found = NamedSharding(mesh, _meshes.spec_of(sharding, (8, 8, 8), mesh))
    assert found.is_equivalent_to(sharding, 3)


@pytest.mark.parametrize("rows", [4, 6])
def test_gradients_whose_sharding_no_spec_says(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Four rows are on every other of eight devices, and six are padded."""
    mesh, spec_of, specs = mesh_of("auto", 8), _meshes.spec_of, []

    def recorded(sharding: Any, *args: Any) -> P:
        specs.append((sharding.is_fully_replicated, spec_of(sharding, *args)))
        return specs[-1][1]

    monkeypatch.setattr(_meshes, "spec_of", recorded)

    def update(x: jax.Array, **mesh: Any) -> Any:
        optimizer = curvax.muon(1.0, method=SMALL, **mesh)
        gradient = (x.reshape(4, 4, 16) * jnp.ones((4, 4, 16))).sum(1) if rows == 4 else x[:6] * 2
        if mesh and rows == 6:
            gradient = jax.lax.with_sharding_constraint(gradient, sharding)
        params = {"kernel": gradient}
        return optimizer.update(params, optimizer.init(params), params)[0]["kernel"]

    sharding = NamedSharding(mesh, P("x"))
    x = jax.random.normal(jax.random.key(0), (16, 16))
    found = jax.jit(lambda x: update(x, mesh=mesh))(jax.device_put(x, sharding))
    assert_close(found, jax.jit(update)(x))
    assert (False, P()) in specs


def test_derivatives_of_an_update() -> None:
    mesh = mesh_of("auto", 2, 4)
    x = {f"{i}/kernel": jax.random.normal(jax.random.key(i), (8, 16)) for i in range(9)}

    def loss(x: Any, **mesh: Any) -> Any:
        optimizer = curvax.muon(1.0, method=SMALL, **mesh)
        updates, _ = optimizer.update(x, optimizer.init(x), x)
        return optax.tree.sum(jax.tree.map(lambda u: u**3, updates))

    placed = jax.device_put(x, NamedSharding(mesh, P("x", "y")))
    found = jax.jit(jax.grad(lambda x: loss(x, mesh=mesh)))(placed)
    expected = jax.jit(jax.grad(loss))(x)
    for name, derivative in expected.items():
        assert_close(found[name], derivative)
        assert np.abs(derivative).max() > 0


@pytest.mark.parametrize(
    "name", cells(["dense, FSDP and tensor", "heads and FSDP, three axes"], of=2)
)
def test_the_detour_of_tpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Along the columns and back: the same updates, from a sharding that an update can name."""
    direct = cost_of(name, "auto").received
    monkeypatch.setattr(OnMesh, "on_detour", property(lambda self: not self.known))
    assert cost_of(name, "auto").received > direct
    layout = LAYOUTS[name]
    mesh, leaves = mesh_of("auto", *layout.mesh), layout.leaves.items()
    shapes, specs = {k: x.shape for k, x in leaves}, {k: x.spec for k, x in leaves}
    make = functools.partial(optimizer_of, layout, method=SMALL)
    as_on_one_device(make, *gradients_of(shapes, 2), mesh, 512.0, specs)
    params = {
        k: jax.ShapeDtypeStruct(x.shape, "float32", sharding=NamedSharding(mesh, x.spec))
        for k, x in leaves
    }
    assert "take a detour" in curvax.summarize(make(mesh=mesh), params)
