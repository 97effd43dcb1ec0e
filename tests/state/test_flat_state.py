"""A state as a dict of arrays: for code that asks every entry of a state for its dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import curvax
from curvax.transforms._paths import is_hole, named_leaves
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, run

PARAMS = {
    "a": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)},
    "attention": {"value": jnp.ones((6, 6))},
}
GRADIENTS = gradients_like(PARAMS, 3)


@pytest.mark.parametrize("make", cells([curvax.asgo, optax.contrib.muon], of=2))
def test_every_entry_is_an_array_and_steps_are_the_same(make: Any) -> None:
    inner = make(0.1)
    (*_, expected), (*_, whole) = run(inner, GRADIENTS, PARAMS)
    (*_, found), (*_, state) = run(curvax.flat_state(inner), GRADIENTS, PARAMS)
    is_entry = {"is_leaf": lambda node: isinstance(node, optax.MaskedNode)}
    assert any(map(is_hole, jax.tree.leaves(whole, **is_entry)))  # what other code stumbles over
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state, **is_entry))
    assert state.keys() == named_leaves(whole).present().keys()
    assert_close(found, expected, factor=0)
    assert_close(state, named_leaves(whole).present(), factor=0)


def test_tools_find_the_arrays_by_their_paths() -> None:
    inner = curvax.racs(0.1)
    flat = curvax.flat_state(inner)
    _, (*_, state) = run(flat, GRADIENTS, PARAMS)
    portable = curvax.portable_state(inner, PARAMS, state)
    placed = curvax.place_state(inner, PARAMS, portable)
    assert_close(named_leaves(placed).present(), state, factor=0)
    found, again = jax.jit(flat.update)(GRADIENTS[0], placed, PARAMS)
    expected, _ = jax.jit(flat.update)(GRADIENTS[0], state, PARAMS)
    assert_close(found, expected, factor=0)
    assert again.keys() == state.keys()


def test_gradients_may_be_wider_than_parameters() -> None:
    """Moments of Optax's Adam then become wider in the first step."""
    optimizer = curvax.flat_state(optax.adam(0.1))
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    (_, found, _), _ = run(optimizer, GRADIENTS, narrow)
    (_, expected, _), _ = run(optax.adam(0.1), GRADIENTS, narrow)
    assert_close(found, expected, factor=0)


def test_an_nnx_optimizer_keeps_it() -> None:
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, curvax.flat_state(curvax.muon(0.1)), wrt=nnx.Param)
    before = jax.tree.structure(optimizer.opt_state)
    for _ in range(2):
        optimizer.update(model, gradients)
    assert jax.tree.structure(optimizer.opt_state) == before
    assert {x.ndim for x in jax.tree.leaves(nnx.as_pure(optimizer.opt_state))} <= {0, 1, 2, 3}
