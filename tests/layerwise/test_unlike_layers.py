"""Layers that are not stacked, one call each: embedding, unlike blocks, head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, normal_like

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


def parameters(width: int = WIDTH) -> dict[str, Any]:
    up = {"up": {"kernel": (width, 9)}, "down": {"kernel": (9, width)}}
    shapes = {
        "embed": {"embedding": (VOCABULARY, width)},
        "wide": up,
        "narrow": {"mix": {"kernel": (width, width), "bias": (width,)}},
        "other": up,
        "head": {"kernel": (width, VOCABULARY)},
    }
    zeros = jax.tree.map(
        lambda shape: np.zeros(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return normal_like(jax.random.key(0), zeros)


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
    """Parameters, states and losses over four steps."""
    found = []
    for step in (ordinary, during):
        params, compiled = parameters(), jax.jit(step)
        states = {name: o.init(params[name]) for name, o in OPTIMIZERS.items()}
        losses = []
        for i in range(4):
            tokens = jax.random.randint(jax.random.key(i), (8,), 0, VOCABULARY)
            params, states, loss = compiled(params, states, tokens)
            losses.append(loss)
        found.append((params, states, losses))
    assert jax.tree.structure(found[1]) == jax.tree.structure(found[0])
    assert_close((found[1][0], found[1][2]), (found[0][0], found[0][2]), 512.0)
    moved = jax.tree.map(lambda p, q: float(jnp.abs(p - q).max()), found[1][0], parameters())
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_extra_arguments_reach_the_optimizer() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, scale: Any, **_: Any) -> Any:
        return jax.tree.map(lambda g: scale * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    layer = {"kernel": jnp.ones(())}
    _, backward = curvax.layerwise(
        lambda p, x: p["kernel"] * x, optimizer, layer, (), jnp.full((), 3.0), stacked=False
    )
    updated, _, dx = backward(1.0, scale=2.0)
    assert (updated["kernel"], dx) == (7.0, 1.0)


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


def test_what_is_not_an_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match="optimizer, the second argument"):
        curvax.layerwise(narrow, optax.sgd, {}, (), jnp.ones(2), stacked=False)  # pyright: ignore


def test_one_gradient_at_a_time_and_in_place() -> None:
    """Of eight layers, in the compiled program; an ordinary step has all gradients."""
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

    def after(layers: Any, states: Any, x: Any) -> Any:
        def total(layers: Any, x: Any) -> Any:
            for layer in layers:
                x = jax.checkpoint(square)(layer, x)
            return jnp.sum(x**2)

        gradients, dx = jax.grad(total, (0, 1))(layers, x)
        found = [
            optimizer.update(g, s, p) for g, s, p in zip(gradients, states, layers, strict=True)
        ]
        updates, states = zip(*found, strict=True)
        return optax.apply_updates(layers, list(updates)), list(states), dx

    def memory(step: Any) -> Any:
        x = jax.ShapeDtypeStruct((4, width), jnp.float32)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(layers, states, x)
        return lowered.compile().memory_analysis()

    found, gradient = memory(step), 4 * width**2
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((layers, states))]
    assert found.alias_size_in_bytes >= sum(sizes)
    assert memory(after).temp_size_in_bytes > number * gradient
    assert found.temp_size_in_bytes < 4 * gradient
