"""Every recipe of `registry.LEADERS` on a small tree: steps, guard, checkpoints, meshes, 4 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from tests.helpers import assert_close, gradients_like, normal_like
from tests.registry import Row, Step
from tests.registry.leaders import LEADERS
from tests.shared.meshes import divided_arrays, mesh_of, on, steps
from tests.shared.reports import table

SHAPES = {
    "layers/kernel": (3, 8, 16),
    "tall/kernel": (16, 8),
    "square/kernel": (8, 8),
    "conv/kernel": (2, 2, 4, 8),  # 16×8
    "tall/bias": (8,),
}
SPECS = {
    "layers/kernel": P(None, "x"),
    "tall/kernel": P("x"),
    "square/kernel": P(None, "x"),
    "conv/kernel": P(),
    "tall/bias": P("x"),
}
AXES = {"layers/kernel": curvax.MatrixAxes(1, 2)}
RATE = 0.1
STEPS = 3
CODED = curvax.quantized(bits=4, block=4, min_elements=1)
every_leader = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in LEADERS])


def make(row: Row, **settings: Any) -> Any:
    return row.optimizer(RATE, weight_dimension_numbers=AXES, **{**row.settings, **settings})


@functools.cache
def given() -> tuple[Any, list[Any]]:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params = normal_like(jax.random.key(1), zeros)
    return jax.tree.map(np.asarray, params), gradients_like(params, STEPS)


class Alone:
    """A recipe on one device, compiled once."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.params = optimizer, given()[0]
        self.step = jax.jit(lambda g, s: optimizer.update(g, s, self.params))

    def run(self, gradients: list[Any], state: Any = None) -> tuple[list[Any], list[Any]]:
        state = jax.jit(self.optimizer.init)(self.params) if state is None else state
        updates, states = [], []
        for gradient in gradients:
            update, state = self.step(gradient, state)
            updates.append(jax.device_get(update))
            states.append(state)
        return updates, states


@functools.cache
def alone(row: Row) -> Alone:
    return Alone(make(row, **coded(row)))


def coded(row: Row) -> dict[str, Any]:
    """With factors, in 4 bits."""
    return {"storage": CODED} if row.factors else {}


@every_leader
def test_its_state_and_its_steps_are_those_of_its_row(row: Row) -> None:
    (params, gradients), dense = given(), make(row)
    updates, states = alone(row).run(gradients)
    assert alone(row).step._cache_size() == 1  # pyright: ignore
    names = {
        part.name
        for path, _ in jax.tree_util.tree_leaves_with_path(states[-1])
        for part in path
        if isinstance(part, jax.tree_util.GetAttrKey)
    } | set(curvax.report(alone(row).optimizer, params, states[-1]).split())
    assert {f for f in row.state_fields if not any(f in name for name in names)} == set()
    if row.factors:  # they take less room
        assert curvax.state_bytes(alone(row).optimizer, params) < curvax.state_bytes(dense, params)
    for t, (update, gradient) in enumerate(zip(updates, gradients, strict=True), start=1):
        for name, shape in SHAPES.items():
            if not name.endswith("kernel"):
                continue
            sizes = (int(np.prod(shape[-4:-1])) if len(shape) == 4 else shape[-2], shape[-1])
            matrices, grads = (x[name].reshape(-1, *sizes) for x in (update, gradient))
            for u, g in zip(matrices, np.asarray(grads), strict=True):
                length = float(np.linalg.norm(u))
                longest = row.longest(Step(*sizes, t, float(np.linalg.norm(g)), g))  # pyright: ignore
                assert 0 < length <= 1.001 * RATE * longest, name


@every_leader
def test_a_bad_gradient_skips_its_matrix_alone(row: Row) -> None:
    (params, gradients), name = given(), "square/kernel"
    expected, _ = alone(row).run(gradients)
    bad = np.array(gradients[1][name])
    bad[3, 2] = np.nan
    updates, states = alone(row).run([gradients[0], {**gradients[1], name: bad}, gradients[2]])
    assert not updates[1][name].any() and updates[2][name].any()
    for update, other in zip(updates, expected, strict=True):
        assert all(np.isfinite(x).all() for x in update.values())
        ours, theirs = ({k: x for k, x in u.items() if k != name} for u in (update, other))
        assert_close(ours, theirs, 0)
    assert_close(updates[0], expected[0], 0)
    counts = table(curvax.report(alone(row).optimizer, params, states[-1]))
    skipped = {name: int(counts[name]["skipped"]) for name in SHAPES}
    assert skipped == {**dict.fromkeys(SHAPES, 0), name: 1}


@every_leader
def test_a_restored_run_goes_on_bit_for_bit(row: Row) -> None:
    (params, gradients), optimizer = given(), alone(row).optimizer
    expected, states = alone(row).run(gradients)
    portable = jax.device_get(curvax.portable_state(optimizer, params, states[0]))
    curvax.check_state(optimizer, params, curvax.describe_state(optimizer, params), portable=True)
    again = curvax.place_state(optimizer, params, portable)
    updates, _ = alone(row).run(gradients[1:], again)
    assert_close(updates, expected[1:], 0)


@every_leader
def test_on_a_mesh_it_is_what_it_is_on_one_device(row: Row) -> None:
    mesh = mesh_of(("auto", "explicit")[LEADERS.index(row) % 2], 4)
    whole, gradients = given()
    optimizer = make(row, mesh=mesh, **coded(row))
    params = on(mesh, whole, SPECS)
    updates, state = steps(optimizer, [on(mesh, g, SPECS) for g in gradients], params, mesh)
    expected, states = alone(row).run(gradients)
    assert_close(jax.device_get(updates), expected, row.growth)
    parts = [x for x in divided_arrays(state) if x.ndim]
    assert parts and all(not x.is_fully_replicated for x in parts)
    portable = curvax.portable_state(optimizer, params, state)
    own = curvax.portable_state(alone(row).optimizer, whole, states[-1])
    assert_close(portable, own, row.growth)
