"""Unequal parts of one parameter (query, key and value of grouped queries) as matrices."""

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, normal, run_scanned
from tests.shared.meshes import as_on_one_device, divided_arrays, mesh_of

# Four query heads and a head each of key and value, of width 2, for 8 features: (8, 4 + 1 + 1, 2).
PARTS = (8, 2, 2)
EDGES = (8, 10)

LAYOUTS: dict[str, tuple[tuple[int, ...], curvax.MatrixAxes, Any]] = {
    "inputs first": ((8, 12), curvax.MatrixAxes(0, 1, column_parts=PARTS), lambda x: x),
    "outputs first": ((12, 8), curvax.MatrixAxes(1, 0, column_parts=PARTS), np.transpose),
    "heads apart": (
        (8, 6, 2),
        curvax.MatrixAxes(0, (1, 2), column_parts=PARTS),
        lambda x: np.reshape(x, (8, 12)),
    ),
}
METHODS: dict[str, Any] = {
    "muon": lambda **settings: curvax.muon(0.1, method=curvax.polar.newton_schulz(3), **settings),
    "soap": lambda **settings: curvax.soap(
        0.1, b1=0.9, b3=0.9, eps=0.1, refresh=2, side="smaller", **settings
    ),
}


def fused(layout: str, number: int = 3) -> tuple[Any, list[Any], dict[str, Any]]:
    """Parameters with one kernel for query, key and value, their gradients, and the axes.

    The stack of keys and values begins with another kernel, and so stands before the queries'.
    """
    shape, axes, _ = LAYOUTS[layout]
    shapes = {"a/kernel": (8, 2), "qkv/kernel": shape, "z/kernel": (8, 8)}
    params = normal(jax.random.key(0), shapes)
    return params, gradients_like(params, number), {"qkv/kernel": axes}


def apart(tree: Any, layout: str) -> Any:
    """The same with a kernel each."""
    whole = LAYOUTS[layout][2](np.asarray(tree["qkv/kernel"]))
    rest = {name: x for name, x in tree.items() if name != "qkv/kernel"}
    names = ("query/kernel", "key/kernel", "value/kernel")
    return rest | dict(zip(names, np.split(whole, EDGES, axis=1), strict=True))


@pytest.mark.parametrize(
    ("method", "layout"),
    cells([("muon", "outputs first"), ("soap", "inputs first"), ("muon", "heads apart")], of=2),
)
def test_a_part_is_what_a_parameter_of_its_own_would_be(method: str, layout: str) -> None:
    params, gradients, axes = fused(layout)
    optimizer = METHODS[method](weight_dimension_numbers=axes)
    updates, states = run_scanned(optimizer, gradients, params)
    plain, params = METHODS[method](), apart(params, layout)
    expected, there = run_scanned(plain, [apart(g, layout) for g in gradients], params)
    for own, other in zip(updates, expected, strict=True):
        assert_close(apart(own, layout), other, 512)
    for own, other in zip(*map(jax.tree.leaves, (states[-1], there[-1])), strict=True):
        assert own.shape == other.shape and own.dtype == other.dtype


def test_parts_of_scanned_layers_are_cut_in_blocks() -> None:
    shape = {"qkv/kernel": (3, 8, 12)}
    axes = {"qkv/kernel": curvax.MatrixAxes(1, 2, column_parts=PARTS)}
    x = normal(jax.random.key(0), shape)
    rule = curvax.MatrixRule(weight_dimension_numbers=axes, block_size=5)
    view = curvax.on_matrices(curvax.momentum(0.0), rule)
    said = "12 matrices 4×4 (2×2 tiles) in stack 4x4 + 6 matrices 4×2"
    assert said in curvax.summarize(view, x)
    updates, _ = view.update(x, view.init(x), x)
    assert_close(updates, x, 0)


@pytest.mark.parametrize(("method", "kind"), cells([("muon", "explicit"), ("soap", "auto")], of=2))
def test_parts_on_a_mesh(method: str, kind: str) -> None:
    mesh = mesh_of(kind, 4)
    whole, gradients, axes = fused("inputs first")
    specs = {name: P(*[None] * (x.ndim - 1), "x") for name, x in whole.items()}
    specs["a/kernel"] = P("x")
    make = functools.partial(METHODS[method], weight_dimension_numbers=axes)
    *_, state = as_on_one_device(make, whole, gradients, mesh, 512, specs, states=True)
    assert all(not x.is_fully_replicated for x in divided_arrays(state) if x.ndim)


def test_checkpoints_and_summaries_show_the_parts() -> None:
    params, _, axes = fused("inputs first")
    optimizer = METHODS["muon"](weight_dimension_numbers=axes)
    description = json.loads(json.dumps(curvax.describe_state(optimizer, params)))
    assert description["matrices"]["qkv/kernel/1"] == "axes [0, 1] as 1 of 8x2 from column 8 of 12"
    assert "axes [0, 1] as 1 of 8x8" in description["matrices"]["z/kernel"]
    curvax.check_state(optimizer, params, description)
    others = {"qkv/kernel": curvax.MatrixAxes(0, 1, column_parts=(2, 2, 8))}
    with pytest.raises(ValueError, match="qkv/kernel/0"):
        curvax.check_state(METHODS["muon"](weight_dimension_numbers=others), params, description)
    one = {"z/kernel": curvax.MatrixAxes(column_parts=[8])}  # which is the whole
    whole = curvax.describe_state(METHODS["muon"](weight_dimension_numbers=one), params)
    assert [*whole["matrices"]] == [*params]
    params, _, axes = fused("heads apart")
    found = curvax.summarize(METHODS["muon"](weight_dimension_numbers=axes), params)
    said = "1 matrix 8×8 in stack 8x8 + 1 matrix 8×2 in stack 8x2 + 1 matrix 8×2 in stack 8x2"
    assert f"| qkv/kernel | 8×6×2 float32 | {said} | {4 * 8 * 12 + 3 * 12} |" in found
