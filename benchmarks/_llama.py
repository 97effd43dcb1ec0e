"""LLaMA in bfloat16 with scanned layers, and its training steps, ordinary and layer-wise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from ._timing import Program
from ._trees import LLAMA, LLAMA_130M, Shapes, abstract_kernels

HEAD = 64  # the width of one of attention
SIZES = {
    "60M": Shapes(512, 1376, 8, 32000),
    "130M": LLAMA_130M,
    # 5461 there. For widths that 128 does not divide, XLA keeps stacks on a TPU in another layout,
    # and copies them: 1.5 GiB of temporaries for 0.2.
    "1.3B": LLAMA["1.3B"]._replace(inner=5504),
    "7B": LLAMA["7B"],
}


def parameters(model: Shapes, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Shapes of embedding, stacked layers and head."""

    layers = abstract_kernels(model, dtype, scanned=True)
    table = jax.ShapeDtypeStruct((model.vocabulary, model.width), dtype)
    head = {"kernel": jax.ShapeDtypeStruct((model.width, model.vocabulary), dtype)}
    return {"embed": {"embedding": table}, "layers": layers, "head": head}


def drawn(params: Any, seed: int) -> Any:
    """Random parameters of these shapes, row after row: an accelerator has room for no more."""

    def leaf(x: Any) -> jax.Array:
        def row(i: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), i)
            return jax.random.uniform(key, x.shape[1:], x.dtype, -0.035, 0.035)

        return jax.jit(lambda: jax.lax.map(row, jnp.arange(x.shape[0])))()

    return jax.tree.map(leaf, params)


def normalized(x: jax.Array) -> jax.Array:
    """RMSNorm without a scale."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)


def embed(p: Any, tokens: jax.Array) -> jax.Array:
    """Vectors of tokens."""
    return p["embedding"][tokens]


def turned(x: jax.Array) -> jax.Array:
    """Queries or keys `(t, heads, HEAD)`, rotated by their positions."""
    angles = jnp.arange(len(x))[:, None] / 10_000 ** (jnp.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(p: Any, x: jax.Array) -> jax.Array:
    """A layer of LLaMA."""
    heads = (len(x), x.shape[-1] // HEAD, HEAD)
    h = normalized(x)
    query, key, value = (
        (h @ p[name]["kernel"]).reshape(heads) for name in ("query", "key", "value")
    )
    query, key = turned(query), turned(key)
    scores = jnp.einsum("thd,shd->hts", query, key, preferred_element_type=jnp.float32)
    past = jnp.tril(jnp.ones((1, len(x), len(x)), bool))
    weights = jax.nn.softmax(jnp.where(past, scores / math.sqrt(HEAD), -1e9)).astype(x.dtype)
    mixed = jnp.einsum("hts,shd->thd", weights, value).reshape(x.shape)
    x = x + mixed @ p["out"]["kernel"]
    h = normalized(x)
    gated = jax.nn.silu(h @ p["gate"]["kernel"]) * (h @ p["up"]["kernel"])
    return x + gated @ p["down"]["kernel"]


def loss(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of the next tokens."""
    logits = (normalized(x) @ p["kernel"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def ordinary(optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any) -> Any:
    """All gradients, then all updates: new parameters, new states, and the loss."""

    def whole(params: Any) -> jax.Array:
        visit = jax.checkpoint(lambda x, p: (block(p, x), None))
        x, _ = jax.lax.scan(visit, embed(params["embed"], tokens), params["layers"])
        return loss(params["head"], x, targets)

    value, gradients = jax.value_and_grad(whole)(curvax.from_int8(params))
    new, new_states = {}, {}
    for name, optimizer in optimizers.items():
        updates, new_states[name] = optimizer.update(gradients[name], states[name], params[name])
        new[name] = optax.apply_updates(params[name], updates)
    return new, new_states, value


def layerwise(optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any) -> Any:
    """Each update as soon as its gradient exists."""

    def call(name: str, f: Any, x: Any, xs: Any = None, **how: Any) -> Any:
        return curvax.layerwise(f, optimizers[name], params[name], states[name], x, xs, **how)

    backward: dict[str, Any] = {}
    x, backward["embed"] = call("embed", embed, tokens, stacked=False)
    x, backward["layers"] = call("layers", block, x)
    value, backward["head"] = call("head", loss, x, targets, stacked=False)
    dx, new, new_states = 1.0, {}, {}
    for name in ("head", "layers", "embed"):
        new[name], new_states[name], dx = backward[name](dx)
    return new, new_states, value


STEPS: dict[str, Callable[..., Any]] = {"ordinary": ordinary, "layerwise": layerwise}


TOKENS, RATE = 256, 1e-3  # of a layer-wise step
RANKS = {"1.3B": 512, "7B": 1024}  # those of GaLore
KERNELS: dict[str, Any] = {
    "weight_dimension_numbers": {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
}


METHODS: dict[str, Callable[[int], Any]] = {
    "racs": lambda rank: curvax.racs(RATE, **KERNELS),
    "galore 8 bits": lambda rank: curvax.quantize_state(
        curvax.galore(RATE, rank=rank, **KERNELS), where=lambda place, leaf: leaf.ndim > 2
    ),
}


def timed(size: str, method: str, step: str, calls: int = 5) -> dict[str, Any]:
    """A step on the device that is there: milliseconds, losses, and the most memory."""
    adamw, layers = optax.adamw(RATE), METHODS[method](RANKS[size])
    optimizers = {"embed": adamw, "layers": layers, "head": adamw}
    params = drawn(parameters(SIZES[size]), 0)
    # As one program this would fold constants of the size of the moments.
    states = {name: o.init(params[name]) for name, o in optimizers.items()}
    tokens = jax.random.randint(jax.random.key(1), (2, TOKENS), 0, SIZES[size].vocabulary)

    def step_of(state: Any, *tokens: jax.Array) -> Any:
        params, states, value = STEPS[step](optimizers, *state, *tokens)
        return (params, states), value

    program = Program(step_of, (params, states), *tokens)
    losses = [float(program.run()) for _ in range(calls)]
    times = program.times
    memory = jax.devices()[0].memory_stats() or {}
    found = {"ms": float(np.median(times[1:])), "first_ms": times[0], "losses": losses}
    return found | {"peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30}
