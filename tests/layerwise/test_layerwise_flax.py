"""Layers that Flax has scanned or stacked: `nn.scan`, and `nnx.vmap`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import curvax
from tests.cells import cells
from tests.layerwise.test_unlike_layers import assert_same_training

LAYERS, WIDTH = 3, 8
AXES = {"*kernel": curvax.MatrixAxes(rows=1, columns=2)}
OPTIMIZER = curvax.muon(0.01, weight_dimension_numbers=AXES)
INPUTS = [jax.random.normal(jax.random.key(i), (4, WIDTH)) for i in range(3)]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        hidden = nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(hidden)), None


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def of_linen() -> tuple[Any, Any, Any]:
    """Parameters, and the functions of one layer and of all."""
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(Block, **axes, length=LAYERS)()
    params = stack.init(jax.random.key(0), INPUTS[0], None)["params"]
    one = lambda p, x: Block().apply({"params": p}, x)[0]  # noqa: E731
    return params, one, lambda p, x: stack.apply({"params": p}, x, None)[0]


def of_nnx() -> tuple[Any, Any, Any]:
    stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))
    graph, params = nnx.split(stack(nnx.Rngs(0)), nnx.Param)
    one = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
    return params, one, lambda p, x: jax.lax.scan(lambda x, p: (one(p, x), None), x, p)[0]


@pytest.mark.parametrize("of_flax", cells([of_linen, of_nnx], of=2))
def test_layers_of_flax_are_trained_as_by_an_ordinary_step(of_flax: Any) -> None:
    with jax.numpy_rank_promotion("allow"):
        params, one, whole = of_flax()

        def loss_of(x: Any) -> Any:
            return jnp.mean(jnp.cumsum(x, axis=0) ** 2)

        def ordinary(params: Any, state: Any, x: Any) -> Any:
            loss, gradient = jax.value_and_grad(lambda p: loss_of(whole(p, x)))(params)
            updates, state = OPTIMIZER.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        def during(params: Any, state: Any, x: Any) -> Any:
            x, backward = curvax.layerwise(one, OPTIMIZER, params, state, x)
            loss, dx = jax.value_and_grad(loss_of)(x)
            return *backward(dx)[:2], loss

        state = OPTIMIZER.init(params)
        assert_same_training((ordinary, during), params, state, INPUTS, 4096.0)
