"""The contract that every optimizer keeps: on all kinds of leaves, and with all of Optax and Flax.

The first part is a product of methods, leaves, dtypes and ways of running. All kinds of leaves are
in one tree, so that a way of running costs one compilation. Every row asserts that the leaves
which should be matrices were: a vector path alone would pass most of the rest.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, gradients_like, normal_like, run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from registry import REGISTRY, Row

import curvax

every_optimizer = pytest.mark.parametrize("row", REGISTRY, ids=lambda row: row.name)


class Leaf(NamedTuple):
    """A kind of leaf: its shape, its matrices, and how a mesh axis "x" cuts rows or columns."""

    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None  # number, rows, columns; None if it is no matrix
    by_row: P
    by_column: P


LEAVES = {
    "wide/kernel": Leaf((8, 16), (1, 8, 16), P("x", None), P(None, "x")),
    "tall/kernel": Leaf((16, 8), (1, 16, 8), P("x", None), P(None, "x")),
    "square/kernel": Leaf((8, 8), (1, 8, 8), P("x", None), P(None, "x")),
    "row/kernel": Leaf((1, 16), (1, 1, 16), P(), P(None, "x")),
    "large/kernel": Leaf((132, 128), (1, 132, 128), P("x", None), P(None, "x")),  # not stacked
    "layers/kernel": Leaf((4, 8, 16), (4, 8, 16), P(None, "x", None), P("x", None, None)),
    "Conv_0/kernel": Leaf((3, 3, 4, 8), (1, 36, 8), P(None, None, "x"), P(None, None, None, "x")),
    "query/kernel": Leaf((8, 4, 4), (1, 8, 16), P("x"), P(None, "x")),
    "out/kernel": Leaf((4, 4, 8), (1, 16, 8), P("x"), P(None, None, "x")),
    "wide/bias": Leaf((16,), None, P("x"), P("x")),
    "temperature": Leaf((), None, P(), P()),
}
SPEC = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
DTYPES = ("float32", "bfloat16")
WAYS = ("jit", "auto-row", "auto-column", "explicit-row", "explicit-column")

# Growth of rounding errors from the gradient to the update, in units of the dtype's epsilon; see
# assert_close. Muon's iterations multiply small singular values by up to 3.44 each, and ASGO's
# roots divide by them.
GROWTH = {"muon": 3.44**3, "racs": 4.0, "asgo": 128.0}


def contract_tree(dtype: str) -> dict[str, jax.Array]:
    zeros = {name: jnp.zeros(leaf.shape, dtype) for name, leaf in LEAVES.items()}
    return normal_like(jax.random.key(1), zeros)


@functools.cache
def on_one_device(row: Row, dtype: str) -> tuple[list[Any], list[Any]]:
    """Two steps without jit on one device, to which every other way of running is compared."""
    params = contract_tree(dtype)
    optimizer = row.make(weight_dimension_numbers=SPEC)
    return run(optimizer, gradients_like(params, 2), params, jit=False)


def assert_matrix_branch(row: Row, optimizer: Any, params: Any, state: Any) -> None:
    """Every matrix has the method's own entries in the state, everything else AdamW's."""
    summary = dict(line[2:].split(" | ", 1) for line in curvax.summarize(optimizer, params).split("\n"))
    for name, leaf in LEAVES.items():
        entries = curvax.state_of(optimizer, params, state, name)
        fields = {part for place in entries for part in place.split("/")}
        matrices = leaf.matrices
        if matrices is None and row.everything:
            matrices = (1, 1, int(np.prod(leaf.shape, dtype=int)))
        if matrices is None:
            assert {"mu", "nu"} <= fields and "matrices" not in fields, name
            assert "no matrix" in summary[name], name
        else:
            assert row.fields <= fields and not {"nu", "others"} & fields, name
            assert {entry.shape[0] for entry in entries.values()} == {matrices[0]}, name
            momenta = [x.shape for place, x in entries.items() if "mu" in place.split("/")]
            assert momenta in ([], [matrices]), name
            assert f"{matrices[1]}×{matrices[2]}" in summary[name], name


@pytest.mark.parametrize("dtype", DTYPES)
@every_optimizer
def test_every_kind_of_leaf(row: Row, dtype: str) -> None:
    params = contract_tree(dtype)
    updates, states = on_one_device(row, dtype)
    for update in updates:
        for name, leaf in LEAVES.items():
            assert update[name].shape == leaf.shape
            assert update[name].dtype == params[name].dtype
            assert jnp.isfinite(update[name]).all() and jnp.any(update[name] != 0)
    optimizer = row.make(weight_dimension_numbers=SPEC)
    assert_matrix_branch(row, optimizer, params, states[-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@every_optimizer
def test_every_way_of_running_gives_the_same_updates(row: Row, dtype: str, way: str) -> None:
    params = contract_tree(dtype)
    gradients = gradients_like(params, 2)
    if way != "jit":
        kind, side = way.split("-")
        types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
        mesh = jax.make_mesh((4,), ("x",), axis_types=types)
        parts = {name: getattr(leaf, f"by_{side}") for name, leaf in LEAVES.items()}
        shardings = {name: NamedSharding(mesh, part) for name, part in parts.items()}
        params = jax.device_put(params, shardings)
        gradients = [jax.device_put(gradient, shardings) for gradient in gradients]
    optimizer = row.make(weight_dimension_numbers=SPEC)
    updates, states = run(optimizer, gradients, params)
    assert_matrix_branch(row, optimizer, params, states[-1])
    if way.startswith("explicit"):
        for name, leaf in params.items():
            same = updates[-1][name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
            assert same, f"{name}: {updates[-1][name].sharding}"
    for update, expected in zip(updates, on_one_device(row, dtype)[0], strict=True):
        assert jax.tree.map(lambda x: x.dtype, update) == jax.tree.map(lambda x: x.dtype, params)
        assert_close(update, expected, GROWTH[row.name])
