"""What a device receives in a step, for the layouts of code that people train with."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.shared.layouts import KINDS, LAYOUTS, bound_of, cost_of, lowered, optimizer_of, share_of
from tests.shared.meshes import AXIS_TYPES, ONE_SHAPE, abstract, as_on_one_device, given, mesh_of

CELLS = [(name, kind) for name in LAYOUTS for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), cells(CELLS, of=28))
def test_a_device_receives_twice_its_share_each_way_at_most(name: str, kind: str) -> None:
    cost = cost_of(name, kind)
    assert 0 < cost.received <= bound_of(name)
    assert not any(x.inside for x in cost.collectives)
    if bound_of(name) == 4:
        assert cost.gathered == 0


@pytest.mark.parametrize(("name", "kind"), cells(CELLS, of=22))
def test_a_layout_does_not_change_the_updates(name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    mesh = mesh_of(kind.split(",")[0], *layout.mesh)
    specs = {key: leaf.spec for key, leaf in layout.leaves.items()}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    place: Any = shardings if "shardings" in kind else mesh

    def make(mesh: Any = None) -> Any:
        given = {} if mesh is None else {"mesh": place}
        return optimizer_of(layout, method=curvax.polar.newton_schulz(2), **given)

    params, gradients = given({key: leaf.shape for key, leaf in layout.leaves.items()}, 2)
    as_on_one_device(make, params, gradients, mesh, 512.0, specs)


@pytest.mark.parametrize(
    ("dtype", "method", "over_share"),
    [
        ("bfloat16", "newton_schulz", 2.0),  # of bytes of bfloat16
        ("float32", curvax.polar.newton_schulz(dtype="bfloat16"), 1.5),
        ("float32", "newton_schulz", 2.0),
    ],
)
@pytest.mark.parametrize("name", ["dense, FSDP along rows", "dense, an uneven count"])
def test_gradients_travel_in_their_dtype_and_directions_in_their_own(
    name: str, dtype: str, method: Any, over_share: float
) -> None:
    """In the program before it is compiled: CPUs exchange float32 only."""
    step, params = lowered(name, "explicit", dtype, method=method)
    sent = re.findall(r"stablehlo\.all_to_all.*-> tensor<([\dx]+)x(bf16|f32)>", step.as_text())
    sizes = [math.prod(map(int, s.split("x"))) * {"bf16": 2, "f32": 4}[t] for s, t in sent]
    # Of 13 matrices a device owns one, and receives one of the five that are left.
    assert len(sizes) == (4 if "uneven" in name else 2)
    assert sum(sizes) == over_share * share_of(params) * (16 / 13 if "uneven" in name else 1)


def test_a_direction_in_bfloat16_is_that_of_one_device() -> None:
    """Where it is rounded as well, so that nothing depends on the number of devices."""
    method = curvax.polar.newton_schulz(dtype="bfloat16")

    def make(**mesh: Any) -> Any:
        direction = optax.chain(curvax.orthogonalize(method), curvax.scale_by_shape())
        return curvax.on_matrices(direction, **mesh)

    # A rounding to bfloat16 or two.
    factor = 2 * float(jnp.finfo("bfloat16").eps / jnp.finfo("float32").eps)
    *_, updates, _ = as_on_one_device(make, *given(ONE_SHAPE, 2), mesh_of("explicit"), factor)
    found = updates[0]["0/kernel"]
    assert found.dtype == jnp.float32
    assert np.array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_the_summary_says_what_a_mesh_would_spare(kind: str) -> None:
    """Sixteen matrices of one shape: a device has two, and an eighth of each without `mesh=`."""
    mesh, params = mesh_of(kind, 2, 4), {f"{i}/kernel": (8, 16) for i in range(16)}
    params = abstract(params, NamedSharding(mesh, P("x", "y")))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    alone, bare, direct = (
        curvax.summarize(curvax.muon(0.1, **given), params)
        for given in ({}, {"mesh": mesh}, {"mesh": shardings})
    )
    assert f"{16 * 8 * 16 * 4 * 7 // 8:,} bytes" in alone
    assert "8 devices the busiest has 1.00" in bare and "8 devices the busiest has 1.00" in direct
    on_one = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    assert "devices" not in curvax.summarize(curvax.muon(0.1), on_one)


def test_the_mesh_of_the_context_and_of_the_parameters() -> None:
    """JAX's own words for it are enough; without a context its mesh is empty."""
    mesh, shapes = mesh_of("explicit"), {"kernel": (8, 16)}
    params = abstract(shapes, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        inside = curvax.muon(0.1, mesh=jax.sharding.get_mesh())
    of_params = curvax.muon(0.1, mesh=jax.tree.map(lambda x: x.sharding, params))
    expected = curvax.state_sharding(curvax.muon(0.1, mesh=mesh), params, mesh)
    for optimizer in (inside, of_params):
        assert curvax.state_sharding(optimizer, params, mesh) == expected
