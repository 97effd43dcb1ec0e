"""LLaMA in bfloat16 with scanned layers, and its training step: ordinary, and layer-wise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from ._trees import LLAMA, LLAMA_130M, Shapes

HEAD = 64  # the width of one of attention
SIZES = {
    "60M": Shapes(512, 1376, 8, 32000),
    "130M": LLAMA_130M,
    "350M": Shapes(1024, 2736, 24, 32000),
    # 5461 there. For widths that 128 does not divide, XLA keeps stacks on a TPU in another layout,
    # and copies them: 1.5 GiB of temporaries for 0.2.
    "1.3B": LLAMA["1.3B"]._replace(inner=5504),
    "7B": LLAMA["7B"],
}


def parameters(model: Shapes, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of embedding, stacked layers and head."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, dtype)}

    layers = {name: kernel(model.layers, *shape) for name, shape in model.matrices().items()}
    table = jax.ShapeDtypeStruct((model.vocabulary, model.width), dtype)
    head = kernel(model.width, model.vocabulary)
    return {"embed": {"embedding": table}, "layers": layers, "head": head}


def drawn(params: Any, seed: int) -> Any:
    """Random parameters of these shapes, drawn by NumPy, as XLA takes minutes for 1.3B on a CPU."""
    draws = np.random.default_rng(seed)

    def leaf(x: Any) -> jax.Array:
        found: Any = np.empty(x.shape, x.dtype)
        for i in range(len(found)):
            found[i] = 0.035 * (2 * draws.random(x.shape[1:], np.float32) - 1)
        return jnp.array(found)

    return jax.tree.map(leaf, params)


def normalized(x: jax.Array) -> jax.Array:
    """RMSNorm without a scale."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)


def embed(p: Any, tokens: jax.Array) -> jax.Array:
    """Vectors of tokens."""
    return p["embedding"][tokens]


def block(p: Any, x: jax.Array) -> jax.Array:
    """A layer of LLaMA; positions take no memory worth counting."""
    heads = (len(x), x.shape[-1] // HEAD, HEAD)
    h = normalized(x)
    query, key, value = (
        (h @ p[name]["kernel"]).reshape(heads) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("thd,shd->hts", query, key, preferred_element_type=jnp.float32)
    past = jnp.tril(jnp.ones((1, len(x), len(x)), bool))
    weights = jax.nn.softmax(jnp.where(past, scores / math.sqrt(HEAD), -1e9)).astype(x.dtype)
    mixed = jnp.einsum("hts,shd->thd", weights, value).reshape(x.shape)
    x = x + mixed @ p["out"]["kernel"]
    h = normalized(x)
    gated = jax.nn.silu(h @ p["gate"]["kernel"]) * (h @ p["up"]["kernel"])
    return x + gated @ p["down"]["kernel"]


def loss(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Of the next tokens."""
    logits = (normalized(x) @ p["kernel"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class Model(NamedTuple):
    """The parts of a model, for one sequence or for several."""

    embed: Callable[..., Any] = embed
    block: Callable[..., Any] = block
    loss: Callable[..., Any] = loss


def ordinary(
    model: Model, optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any
) -> Any:
    """All gradients, then all updates: new parameters, new states, and the loss."""

    def whole(params: Any) -> jax.Array:
        visit = jax.checkpoint(lambda x, p: (model.block(p, x), None))
        x, _ = jax.lax.scan(visit, model.embed(params["embed"], tokens), params["layers"])
        return model.loss(params["head"], x, targets).mean()

    value, gradients = jax.value_and_grad(whole)(curvax.from_int8(params))
    new, new_states = {}, {}
    for name, optimizer in optimizers.items():
        updates, new_states[name] = optimizer.update(gradients[name], states[name], params[name])
        new[name] = optax.apply_updates(params[name], updates)
    return new, new_states, value


def layerwise(
    model: Model, optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any
) -> Any:
    """Each update as soon as its gradient exists."""

    def call(name: str, f: Any, x: Any, xs: Any = None, **how: Any) -> Any:
        return curvax.layerwise(f, optimizers[name], params[name], states[name], x, xs, **how)

    backward: dict[str, Any] = {}
    mean = lambda p, x, targets: model.loss(p, x, targets).mean()  # noqa: E731
    x, backward["embed"] = call("embed", model.embed, tokens, stacked=False)
    x, backward["layers"] = call("layers", model.block, x)
    value, backward["head"] = call("head", mean, x, targets, stacked=False)
    dx, new, new_states = 1.0, {}, {}
    for name in ("head", "layers", "embed"):
        new[name], new_states[name], dx = backward[name](dx)
    return new, new_states, value


STEPS: dict[str, Callable[..., Any]] = {"ordinary": ordinary, "layerwise": layerwise}
