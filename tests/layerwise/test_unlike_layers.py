"""Layers that are not stacked, one call each: embedding, unlike blocks, head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from tests.helpers import assert_close, normal

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


def assert_same_training(steps: Any, params: Any, states: Any, inputs: Any, factor: float) -> None:
    """Of two steps: parameters and losses are close, states have one form, and all moves."""
    found = []
    for step in map(jax.jit, steps):
        own, state, losses = params, states, []
        for x in inputs:
            own, state, loss = step(own, state, x)
            losses.append(loss)
        found.append((own, state, losses))
    assert jax.tree.structure(found[1]) == jax.tree.structure(found[0])
    assert_close(found[1][::2], found[0][::2], factor)
    moved = jax.tree.map(lambda p, q: float(jnp.abs(p - q).max()), found[1][0], params)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_unlike_blocks_equal_an_ordinary_step_with_an_optimizer_for_each() -> None:
    params = parameters()
    states = {name: o.init(params[name]) for name, o in OPTIMIZERS.items()}
    inputs = [jax.random.randint(jax.random.key(i), (8,), 0, VOCABULARY) for i in range(4)]
    assert_same_training((ordinary, during), params, states, inputs, 512.0)


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
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    layers = [{"kernel": shape} for _ in range(number)]
    optimizer = curvax.racs(0.1)
    states = [jax.eval_shape(optimizer.init, layer) for layer in layers]

    def square(layer: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ layer["kernel"])

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
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(layers, states, x)
    found: Any = lowered.compile().memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((layers, states))]
    assert found.alias_size_in_bytes >= sum(sizes)
    assert found.temp_size_in_bytes < 4 * (4 * width**2)
