"""Matrices that several devices share: the numbers of one device, and a part of its work each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

import curvax
from curvax.transforms.distribute import _distribute, _shares
from curvax.transforms.distribute._layout import DistributedState
from tests.algebra import leaves_in
from tests.cells import cells
from tests.shared.meshes import as_on_one_device, assert_same_arrays, begin, given, mesh_of, on

SHAPES = {"wide/kernel": (32, 96), "tall/kernel": (96, 32), "small/kernel": (8, 8)}
METHODS: dict[str, Callable[..., Any]] = {
    "muon": curvax.muon,
    "muon, b2": functools.partial(curvax.muon, b2=0.9),
    "muon, aol": functools.partial(
        curvax.muon, method=curvax.polar.newton_schulz(4, norm="aol"), nesterov=False
    ),
    "muon, qdwh": functools.partial(curvax.muon, method="qdwh"),
}


@pytest.fixture(autouse=True)
def _also_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_distribute, "SMALLEST", 32)
    monkeypatch.setattr(_shares, "EXCHANGE", 0.0)


def shared(state: Any) -> list[jax.Array]:
    """The arrays of matrices that devices share."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, DistributedState))
    split = [node.split for node in nodes if isinstance(node, DistributedState)]
    return jax.tree.leaves(split)


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    cells(
        [
            ("muon, b2", "auto", (4,)),
            ("muon", "auto", (4,)),
            ("muon, aol", "explicit", (2, 2)),
            ("muon, qdwh", "auto", (2, 2)),
        ],
        of=4,
    ),
)
def test_shared_matrices_have_the_updates_of_one_device(
    name: str, kind: str, shape: tuple[int, ...]
) -> None:
    mesh, make = mesh_of(kind, *shape), functools.partial(METHODS[name], 0.1)
    optimizer, placed, _, found = as_on_one_device(make, *given(SHAPES, 3), mesh, 4096, states=True)
    long = [x for x in shared(found) if max(x.shape) >= 32]
    assert long
    assert all(x.addressable_shards[0].data.size == x.size // 4 for x in long)
    # Portable states do not know about it, and come back as they were.
    portable = curvax.portable_state(optimizer, placed, found)
    assert_same_arrays(curvax.place_state(optimizer, placed, portable), found)
    assert "on 4 of 4 devices, which share 1 matrix" in curvax.summarize(optimizer, placed)


def program(optimizer: Any, params: Any, mesh: Any) -> Any:
    state = begin(optimizer, params, mesh)
    return jax.jit(optimizer.update).lower(params, state, params).compile()


def flops(made: Any) -> float:
    return made.cost_analysis()["flops"]


def test_each_device_has_its_part_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of two matrices on four devices: all products, also those of Grams."""
    params, _ = given({"a/kernel": (64, 256), "b/kernel": (64, 256)}, 1)
    mesh = mesh_of()
    alone = curvax.muon(0.1)
    one = jax.jit(alone.update).lower(params, alone.init(params), params).compile()
    made = program(curvax.muon(0.1, mesh=mesh), on(mesh, params), mesh)
    assert flops(made) < 0.35 * flops(one)
    monkeypatch.setattr(_shares, "EXCHANGE", 1e9)
    dealt = program(curvax.muon(0.1, mesh=mesh), on(mesh, params), mesh)
    assert flops(dealt) > 0.45 * flops(one)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (curvax.soap, SHAPES),
        (curvax.swan, SHAPES),
        (functools.partial(curvax.sumo, rank=2), SHAPES),
        (functools.partial(curvax.muon, method="svd"), SHAPES),
        (curvax.racs, SHAPES),  # nothing that devices could divide
        (curvax.muon, {f"{i}/kernel": (32, 96) for i in range(8)}),  # which keep all devices busy
    ],
)
def test_what_is_not_shared(make: Callable[..., Any], shapes: Any) -> None:
    """Decompositions, and matrices of which each device has as many."""
    params, mesh = given(shapes, 1)[0], mesh_of()
    state = begin(make(0.1, mesh=mesh), on(mesh, params), mesh)
    assert not shared(state)
    assert shapes is SHAPES or all(len(x) == 8 for x in leaves_in(state, ["mu"])["mu"])
