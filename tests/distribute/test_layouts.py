"""What a device receives in a step, for the layouts of code that people train with."""

import math
from typing import Any

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.helpers import ALL_CELLS, share
from tests.shared.layouts import DEVICES, KINDS, LAYOUTS, cost_of, optimizer_of
from tests.shared.meshes import as_on_one_device, given, mesh_of

CELLS = [(name, kind) for name in LAYOUTS for kind in KINDS if kind != "auto"]


def needed(name: str) -> float:
    """Twice a device's share of the matrices each way, and what it has of updates beyond a share.

    The updates of kernels that are whole along a mesh axis have to come from devices along it.
    """
    layout = LAYOUTS[name]
    mesh = mesh_of("auto", *layout.mesh)
    whole = sum(math.prod(x.shape) for x in layout.leaves.values())
    own = sum(
        math.prod(NamedSharding(mesh, x.spec).shard_shape(x.shape)) for x in layout.leaves.values()
    )
    return 4 + (own * DEVICES / whole - 1)


@pytest.mark.parametrize(("name", "kind"), share(CELLS, of=7))
def test_a_device_receives_twice_its_share_each_way_at_most(name: str, kind: str) -> None:
    cost = cost_of(name, kind)
    assert 0 < cost.received <= needed(name)
    assert not any(x.inside for x in cost.collectives)
    if needed(name) == 4:
        assert cost.gathered == 0


@pytest.mark.parametrize("kind", share(KINDS, of=3))
def test_what_is_sharded_along_one_axis_needs_no_shardings(kind: str) -> None:
    names = [name for name in LAYOUTS if name.endswith("FSDP") or "over all devices" in name]
    assert len(names) > 2
    for name in names[:: 1 if ALL_CELLS else 2]:
        assert cost_of(name, kind).received <= needed(name)


@pytest.mark.parametrize(("name", "kind"), share(CELLS, of=5))
def test_a_layout_does_not_change_the_updates(name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    mesh = mesh_of(kind.split(",")[0], *layout.mesh)
    specs = {key: leaf.spec for key, leaf in layout.leaves.items()}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    place: Any = shardings if "shardings" in kind else mesh

    def make(mesh: Any = None) -> Any:
        return optimizer_of(layout, **({} if mesh is None else {"mesh": place}))

    params, gradients = given({key: leaf.shape for key, leaf in layout.leaves.items()}, 2)
    as_on_one_device(make, params, gradients, mesh, 512.0, specs)


def test_shardings_are_of_one_mesh() -> None:
    mixed = {name: NamedSharding(mesh_of("auto", n), P()) for name, n in (("a", 2), ("b", 4))}
    with pytest.raises(ValueError, match="mesh.*one mesh"):
        optimizer_of(LAYOUTS["heads"], mesh=mixed)


@pytest.mark.parametrize("number", [4, 3])
def test_a_direction_of_another_shape_is_named(number: int) -> None:
    """Of matrices that are divided evenly, and of those that are left."""
    params, _ = given({f"{i}/kernel": (4, 6) for i in range(number)}, 1)
    transposing = optax.stateless(lambda g, _: jax.tree.map(lambda x: x.swapaxes(-1, -2), g))
    optimizer = curvax.on_matrices(transposing, mesh=mesh_of())
    with pytest.raises(ValueError, match="'4x6' must have the shape of their gradient"):
        optimizer.update(params, optimizer.init(params), params)
