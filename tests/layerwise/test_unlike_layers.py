"""Layers of models: unlike ones, one call each, and those that Flax has scanned or stacked."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import curvax
from tests.cells import cells
from tests.helpers import assert_close, normal
from tests.layerwise.test_layerwise import SPECIFIED, assert_same_steps, square, steps_of, trained
from tests.shared.programs import temporaries

VOCABULARY, WIDTH, SGD = 11, 6, optax.sgd(0.1)


def embedding(layer: Any, tokens: Any) -> Any:
    return {"x": layer["embedding"][tokens], "positions": jnp.arange(tokens.shape[0])}


def wide(layer: Any, inside: Any) -> Any:
    x = inside["x"] * jnp.cos(inside["positions"])[:, None]
    return {**inside, "x": x + jnp.tanh(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]}


def narrow(layer: Any, inside: Any) -> Any:
    x = inside["x"]
    return {**inside, "x": x + jnp.sin(x @ layer["mix"]["kernel"] + layer["mix"]["bias"][None])}


def head(layer: Any, inside: Any, targets: Any) -> Any:
    logits = inside["x"] @ layer["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


BLOCKS = {"embed": embedding, "wide": wide, "narrow": narrow, "other": wide, "head": head}
OPTIMIZERS = {
    "embed": optax.adamw(0.01),
    "wide": curvax.asgo(0.01, refresh=2),
    "narrow": curvax.racs(0.01),
    "other": optax.chain(optax.clip_by_global_norm(0.01), curvax.muon(0.01)),  # its own norm
    "head": optax.chain(curvax.clip_by_last_norm(0.1), optax.adamw(0.01)),
}


def parameters() -> dict[str, Any]:
    up = {"up": {"kernel": (WIDTH, 9)}, "down": {"kernel": (9, WIDTH)}}
    return normal(
        jax.random.key(0),
        {
            "embed": {"embedding": (VOCABULARY, WIDTH)},
            "wide": up,
            "narrow": {"mix": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}},
            "other": up,
            "head": {"kernel": (WIDTH, VOCABULARY)},
        },
    )


def ordinary(params: Any, states: Any, tokens: Any) -> Any:
    def total(params: Any) -> Any:
        x = tokens
        for name, block in BLOCKS.items():
            x = block(params[name], x, *[tokens[::-1]] if name == "head" else [])
        return x

    loss, gradients = jax.value_and_grad(total)(params)
    new, new_states = {}, {}
    for name, optimizer in OPTIMIZERS.items():
        updates, new_states[name] = optimizer.update(gradients[name], states[name], params[name])
        new[name] = optax.apply_updates(params[name], updates)
    return new, new_states, loss


def during(params: Any, states: Any, tokens: Any) -> Any:
    x, backward = tokens, {}
    for name, block in BLOCKS.items():
        x, backward[name] = curvax.layerwise(
            block,
            OPTIMIZERS[name],
            params[name],
            states[name],
            x,
            xs=tokens[::-1] if name == "head" else None,
            stacked=False,
        )
    loss, dx, new, new_states = x, 1.0, {}, {}
    for name in reversed(BLOCKS):
        new[name], new_states[name], dx = backward[name](dx)
    return {name: new[name] for name in BLOCKS}, new_states, loss


def test_unlike_blocks_equal_an_ordinary_step_with_an_optimizer_for_each() -> None:
    params = parameters()
    states = {name: o.init(params[name]) for name, o in OPTIMIZERS.items()}
    inputs = [jax.random.randint(jax.random.key(i), (8,), 0, VOCABULARY) for i in range(4)]
    expected, found = trained((ordinary, during), params, states, inputs)
    assert_close(found[::2], expected[::2], 512.0)
    moved = jax.tree.map(lambda p, q: float(jnp.abs(p - q).max()), found[0], params)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("stacked", [False, True])
def test_extra_arguments_reach_the_optimizer(stacked: bool) -> None:
    def update(updates: Any, state: Any, params: Any = None, *, scale: Any, **_: Any) -> Any:
        return jax.tree.map(lambda g: scale * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    layer, x = {"kernel": jnp.ones((1,) if stacked else ())}, jnp.full((), 3.0)
    product = lambda p, x: p["kernel"] * x  # noqa: E731
    _, backward = curvax.layerwise(product, optimizer, layer, (), x, stacked=stacked)
    updated, _, dx = backward(jnp.ones(()), scale=2.0)
    assert (updated["kernel"].item(), dx) == (7.0, 1.0)


@pytest.mark.parametrize("stacked", [False, True])
def test_each_pass_updates_the_weights_that_its_call_got(stacked: bool) -> None:
    """By its own part of the gradient: nothing adds up the parts of tied weights."""
    layers, x = {"kernel": jnp.eye(3)[None] if stacked else jnp.eye(3)}, jnp.ones(3)

    def block(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["kernel"])

    def tied(layers: Any, x: Any) -> Any:
        call = functools.partial(curvax.layerwise, block, SGD, layers, SGD.init(layers))
        x, first = call(x, stacked=stacked)
        x, second = call(x, stacked=stacked)
        of_second, _, dx = second(jnp.ones(3))
        return first(dx)[0]["kernel"], of_second["kernel"]

    def total(one: Any, other: Any) -> Any:
        return jnp.sum(block({"kernel": other}, block({"kernel": one}, x)))

    weights = layers["kernel"].reshape(3, 3)
    parts = jax.grad(total, (0, 1))(weights, weights)
    for found, part in zip(jax.jit(tied)(layers, x), parts, strict=True):
        assert_close(found.reshape(3, 3), weights - 0.1 * part)


def test_one_gradient_at_a_time_and_in_place() -> None:
    """Of eight layers, in the compiled program."""
    width, number = 96, 8
    layers = [{"kernel": jax.ShapeDtypeStruct((width, width), jnp.float32)} for _ in range(number)]
    optimizer = curvax.racs(0.1)
    states = [jax.eval_shape(optimizer.init, layer) for layer in layers]

    def step(layers: Any, states: Any, x: Any) -> Any:
        backward = []
        for layer, state in zip(layers, states, strict=True):
            x, back = curvax.layerwise(square, optimizer, layer, state, x, stacked=False)
            backward.append(back)
        dx, new = 2 * x, []
        for back in reversed(backward):
            *updated, dx = back(dx)
            new.append(updated)
        return [layer for layer, _ in new[::-1]], [state for _, state in new[::-1]], dx

    x = jax.ShapeDtypeStruct((4, width), jnp.float32)
    assert temporaries(step, layers, states, x) < 4 * (4 * width**2)


LAYERS = 3
OPTIMIZER = curvax.muon(0.01, **SPECIFIED)
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
    """Parameters, and the functions of one layer and of all, which may be a scan of it."""
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(Block, **axes, length=LAYERS)()
    params = stack.init(jax.random.key(0), INPUTS[0], None)["params"]
    one = lambda p, x: Block().apply({"params": p}, x)[0]  # noqa: E731
    return params, one, lambda p, x: stack.apply({"params": p}, x, None)[0]


def of_nnx() -> tuple[Any, Any, Any]:
    stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))
    graph, params = nnx.split(stack(nnx.Rngs(0)), nnx.Param)
    return params, lambda p, x: nnx.merge(graph, p)(x), None


@pytest.mark.parametrize("of_flax", cells([of_linen, of_nnx], of=2))
def test_layers_of_flax_are_trained_as_by_an_ordinary_step(of_flax: Any) -> None:
    with jax.numpy_rank_promotion("allow"):
        params, one, whole = of_flax()

        def loss(x: Any) -> Any:
            return jnp.mean(jnp.cumsum(x, axis=0) ** 2)

        steps = steps_of(OPTIMIZER, one, loss, whole)
        assert_same_steps(OPTIMIZER, 4096.0, params, INPUTS, steps)
