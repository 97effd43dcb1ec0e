"""Transformations in eigenbases: narrow moments, and bases that are read one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax
from curvax.transforms.storage import _quantized
from tests.helpers import assert_close
from tests.shared.soap import soap_gradients, soap_trajectory


def test_the_first_moment_may_be_in_bfloat16():
    gradients = soap_gradients((5, 9))
    direction = curvax.scale_by_soap(dtype=jnp.bfloat16, refresh=2, side="smaller")
    state = jax.eval_shape(direction.init, jnp.zeros((5, 9)))
    assert (state.inner.mu.dtype, state.inner.nu.dtype) == (jnp.bfloat16, jnp.float32)
    found, states = soap_trajectory(direction, gradients, "float32")
    assert states.inner.mu.dtype == jnp.bfloat16
    whole, _ = soap_trajectory(
        curvax.scale_by_soap(refresh=2, side="smaller"), gradients, "float32"
    )
    error = np.linalg.norm(found - whole) / np.linalg.norm(whole)
    assert 1e-5 < error < 0.02  # bfloat16 has 8 bits


def test_bases_that_are_read_one_by_one_give_the_same_directions(monkeypatch):
    """In a loop over the matrices of a leaf, with the inner transformation and its state inside."""
    storage = curvax.packed(block=4, min_elements=25)
    settings = {"refresh": curvax.every(2), "side": "left", "storage": storage}
    wrapped = curvax.in_eigenbasis(optax.scale_by_adam(), **settings)
    draw = np.random.default_rng(0)
    gradients = [
        {"large": draw.standard_normal((2, 6, 9)), "small": draw.standard_normal((3, 4))}
        for _ in range(4)
    ]

    def run(start):
        monkeypatch.setattr(_quantized, "SINGLY_FROM", start)
        update = jax.jit(lambda g, s: wrapped.update(g, s))
        state, found = jax.jit(wrapped.init)(jax.tree.map(jnp.float32, gradients[0])), []
        for g in jax.tree.map(jnp.float32, gradients):
            directions, state = update(g, state)
            found.append(directions)
        return found, state

    at_once, one_by_one = run(1000), run(5)
    assert_close(one_by_one, at_once, 256)
    assert jax.tree.leaves(one_by_one[1]["large"].inner)[0] == len(gradients)
