"""Stacked layers cut over devices as FSDP cuts them, with Auto and Explicit axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.helpers import assert_close
from tests.hlo import collectives
from tests.layerwise.test_layerwise import steps_of, trained
from tests.shared.meshes import both_axis_types, explicit_by_default, mesh_of

LAYERS, WIDTH, INNER, DEVICES, STEPS = 6, 16, 16, 8, 3
BATCH = 32  # gradients of full rank: no basis is arbitrary
CUTS = {"up": P(None, "x"), "down": P(None, None, "x")}
AXES: dict[str, Any] = {
    "weight_dimension_numbers": {"*kernel": curvax.MatrixAxes(rows=1, columns=2)}
}
OPTIMIZERS = {
    "racs": lambda: curvax.racs(0.01, **AXES),
    "muon": lambda: curvax.muon(0.01, **AXES),
    "adamw": lambda: optax.adamw(0.01),
    "soap": lambda: curvax.soap(0.01, refresh=2, **AXES),
    "alice": lambda: curvax.alice(0.01, rank=4, switching=curvax.subspaces.complement(2), **AXES),
    "clipped": lambda: optax.chain(curvax.clip_by_last_norm(0.1), optax.sgd(0.1)),
}


def block(layer: Any, x: Any) -> Any:
    """Gathers its own weights, as FSDP does; Auto axes would do it without being told."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.axis_names and mesh.are_all_axes_explicit:
        whole = NamedSharding(mesh, P())
        layer = jax.tree.map(lambda p: jax.sharding.reshard(p, whole), layer)
    return x + jnp.tanh(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]


def mean_square(x: Any) -> Any:
    return jnp.mean(x**2)


def layers_on(mesh: Mesh) -> Any:
    draw = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    return {
        name: {
            "kernel": jax.device_put(
                np.float32(0.3 * draw.standard_normal(shape)), NamedSharding(mesh, CUTS[name])
            )
        }
        for name, shape in shapes.items()
    }


def inputs_on(mesh: Mesh) -> list[Any]:
    draw, sharding = np.random.default_rng(1), NamedSharding(mesh, P("x"))
    xs = [np.float32(draw.standard_normal((BATCH, WIDTH))) for _ in range(STEPS)]
    return [jax.device_put(x, sharding) for x in xs]


@explicit_by_default
@pytest.mark.parametrize("name", cells(OPTIMIZERS, of=10))
def test_layers_cut_over_devices_equal_those_of_an_ordinary_step(name: str, kind: str) -> None:
    mesh, optimizer = mesh_of(kind, DEVICES), OPTIMIZERS[name]()
    layers = layers_on(mesh)
    expected, (layers, _, _) = trained(
        steps_of(optimizer, block, mean_square), layers, optimizer.init(layers), inputs_on(mesh)
    )
    assert_close(layers, expected[0], 512.0)
    for name, cut in CUTS.items():
        kernel = layers[name]["kernel"]
        assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, cut), 3)


@both_axis_types
def test_a_layer_is_gathered_in_its_turn(kind: str) -> None:
    """Collectives are in the loops over layers, and none has more than one matrix."""
    mesh, optimizer = mesh_of(kind, DEVICES), OPTIMIZERS["adamw"]()
    layers = layers_on(mesh)
    given = layers, optimizer.init(layers), inputs_on(mesh)[0]
    _, during = steps_of(optimizer, block, mean_square)
    found = collectives(jax.jit(during).lower(*given).compile().as_text())
    matrix = 4 * WIDTH * INNER
    assert any(c.kind == "all-gather" and c.bytes == matrix for c in found)
    assert all(c.inside for c in found if c.bytes >= matrix)
    assert max(c.bytes for c in found) <= 2 * matrix  # two matrices in one all-reduce
