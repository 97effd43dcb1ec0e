"""Counters at their limits: they saturate, and refreshes go on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms._counts import Counts, counters, next_step
from tests.cells import cells
from tests.helpers import gradients_like
from tests.registry import NAMED

LARGEST = 2**31 - 1


@counters
class Pair(NamedTuple):
    """Two counters."""

    value: Any
    names = ("few", "many")


def test_counters_stay_at_the_largest_number() -> None:
    counts = Pair(jnp.array([[0, LARGEST], [-5, LARGEST - 1]], jnp.int32))
    for _ in range(2):
        counts = counts.plus(few=True, many=jnp.array([1, 2]))
    assert counts.of("many").tolist() == [LARGEST, LARGEST]
    assert counts.of("few").tolist() == [2, 2]  # a negative number is a damaged 0
    assert counts.value.dtype == jnp.int32


def test_the_step_after_the_last_keeps_counting() -> None:
    steps = [next_step(jnp.int32(count)) for count in (0, 41, LARGEST - 1, LARGEST, -7)]
    assert [int(step) for step in steps] == [1, 42, LARGEST, 2**30, 1]
    assert all(step.dtype == jnp.int32 for step in steps)


@pytest.mark.parametrize("name", cells(["shampoo", "soap", "galore", "muon"], of=4))
@pytest.mark.parametrize("count", [LARGEST - 2, -3])
def test_an_optimizer_goes_on_at_the_limit(name: str, count: int) -> None:
    """Refreshes too: at 2³¹ - 1 the count used to stay, and was never due again."""
    row = NAMED[name]
    optimizer = row.make()
    params = {"kernel": np.zeros((4, 6), np.float32)}
    *before, last = gradients_like(params, 10)
    step, state = jax.jit(optimizer.update), optimizer.init(params)
    _, state = step(last, state, params)

    def at_limit(path: object, x: jax.Array) -> jax.Array:
        return jnp.full_like(x, count) if jax.tree_util.keystr(path).endswith(".count") else x

    state = jax.tree_util.tree_map_with_path(at_limit, state)
    moves = []
    for gradient in before:
        updates, state = step(gradient, state, params)
        assert np.isfinite(updates["kernel"]).all()
        moves.append(bool(np.any(updates["kernel"])))
    assert all(moves[1:])  # Optax's Adam divides by 0 once, and its state starts anew
    if row.keeps:
        refreshes = [
            int(np.max(entry))
            for place, entry in curvax.state_of(optimizer, params, state, "kernel").items()
            if place.endswith("/refreshes")
        ]
        assert min(refreshes) >= 4, refreshes


@pytest.mark.parametrize("name", NAMED)
def test_all_nodes_of_a_state_are_plain_named_tuples(name: str) -> None:
    """By the usual test for one, with which libraries save and restore states."""
    found = []

    def visit(node: Any) -> bool:
        found.append(node)
        return False

    params = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    jax.tree.leaves(jax.eval_shape(NAMED[name].make().init, params), is_leaf=visit)
    named = [type(x) for x in found if isinstance(x, tuple) and hasattr(x, "_fields")]
    assert named and all(kind.__bases__ == (tuple,) for kind in named)
    assert any(issubclass(kind, Counts) for kind in named)
