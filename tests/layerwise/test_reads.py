"""After which result each weight has been read for the last time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from helpers import assert_close, normal_like

from curvax.transforms.layerwise._reads import reading


def pulled(layer: Any, x: jax.Array, dy: jax.Array) -> Any:
    def block(layer: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ layer["up"].astype(x.dtype))
        return hidden @ layer["down"] + layer["bias"][None]

    return jax.vjp(block, layer, x)[1](dy)


def test_the_last_reads_are_the_products_of_the_backward_pass() -> None:
    """`dy downᵀ`, and then that with `upᵀ`; a bias is read in the forward pass alone."""
    shapes = {"up": (4, 6), "down": (6, 4), "bias": (4,), "unused": (2,)}
    layer = normal_like(jax.random.key(0), {name: jnp.zeros(s) for name, s in shapes.items()})
    x, dy = normal_like(jax.random.key(1), [jnp.zeros((3, 4))] * 2)
    (gradient, dx), after = jax.jit(lambda *given: reading(pulled, *given))(layer, x, dy)
    expected = pulled(layer, x, dy)
    jax.tree.map(assert_close, (gradient, dx), expected)
    assert {name: [x.shape for x in own] for name, own in after.items()} == {
        "up": [(3, 4)],
        "down": [(3, 6)],
        "bias": [(3, 4)],
        "unused": [],
    }
    assert_close(after["down"][0], dy @ layer["down"].T)
    assert_close(after["up"][0], expected[1])
