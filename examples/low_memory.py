"""Train with the memory of the weights: each layer is updated during the backward pass.

    python examples/low_memory.py               # about a minute on two CPU cores

An ordinary step holds the gradients of all layers until the optimizer has run. With
`curvax.layerwise` the backward pass updates each layer as soon as its gradient exists, so that the
gradient of one layer is in memory; with RACS, which has next to no state, hardly anything but the
weights remains. The script prints the memory that XLA reserves for both steps, and trains with the
second.

The text is that of `train_lm.py`. docs/memory.md has other ways to save memory.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from train_lm import read_corpus

import curvax

CONTEXT, BATCH, HEAD = 64, 4, 32


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *batch, width = x.shape
        h = nn.RMSNorm(name="norm1")(x)
        query, key, value = (
            nn.Dense(width, use_bias=False, name=name)(h).reshape(*batch, width // HEAD, HEAD)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(width, use_bias=False, name="out")(mixed)
        h = nn.Dense(4 * width, use_bias=False, name="up")(nn.RMSNorm(name="norm2")(x))
        return x + nn.Dense(width, use_bias=False, name="down")(nn.gelu(h))


# The model is three functions of parameters and input. The layers are alike, so their parameters
# are stacked along a first axis, as `nn.scan` stacks them too.


def embed(params, tokens):
    return params["tokens"][tokens] + params["positions"]


def block(params, x):
    return Block().apply({"params": params}, x)


def loss_of(params, x, targets):
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    logits = x @ params["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_params(symbols: int, width: int, depth: int):
    keys = jax.random.split(jax.random.key(0), depth + 3)
    small = jax.nn.initializers.normal(0.02)
    x = jnp.zeros((1, CONTEXT, width))
    return {
        "embed": {
            "tokens": small(keys[0], (symbols, width)),
            "positions": small(keys[1], (CONTEXT, width)),
        },
        "layers": jax.vmap(lambda key: Block().init(key, x)["params"])(keys[3:]),
        "head": {"kernel": small(keys[2], (width, symbols))},
    }


# Axis 0 of a stacked kernel is that of the layers, so its rows are axis 1.
OPTIMIZERS = {
    "embed": optax.adamw(3e-3),
    "layers": curvax.racs(
        1e-2, weight_dimension_numbers={"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    ),
    "head": optax.adamw(3e-3),
}


def ordinary_step(params, states, tokens):
    """All gradients, then all updates."""

    def loss(params):
        x = embed(params["embed"], tokens[:, :-1])
        visit = jax.checkpoint(lambda x, layer: (block(layer, x), None))
        x, _ = jax.lax.scan(visit, x, params["layers"])
        return loss_of(params["head"], x, tokens[:, 1:])

    value, gradients = jax.value_and_grad(loss)(params)
    params, states = dict(params), dict(states)
    for name, optimizer in OPTIMIZERS.items():
        updates, states[name] = optimizer.update(gradients[name], states[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
    return params, states, value


def layerwise_step(params, states, tokens):
    """The same numbers: forward through the parts, and backward in reverse, updating each."""

    def apply(name, function, x, xs=None, *, stacked=False):
        return curvax.layerwise(
            function, OPTIMIZERS[name], params[name], states[name], x, xs, stacked=stacked
        )

    x, embed_backward = apply("embed", embed, tokens[:, :-1])
    x, layers_backward = apply("layers", block, x, stacked=True)
    value, head_backward = apply("head", loss_of, x, tokens[:, 1:])

    params, states = dict(params), dict(states)
    params["head"], states["head"], dx = head_backward(1.0)
    params["layers"], states["layers"], dx = layers_backward(dx)
    params["embed"], states["embed"], _ = embed_backward(dx)
    return params, states, value


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the memory of the weights.")
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="(%(default)s)")
    args = parser.parse_args()
    if min(args.steps, args.width, args.depth) < 1 or args.width % HEAD:
        parser.error(f"--steps, --width, --depth must be positive, --width a multiple of {HEAD}")

    corpus = read_corpus(None, CONTEXT)
    params = make_params(corpus.symbols, args.width, args.depth)
    states = {name: optimizer.init(params[name]) for name, optimizer in OPTIMIZERS.items()}
    tokens = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
    print(f"weights of {weights:.1f} MB")
    print("step        temporaries, MB   peak, MB")
    steps, peaks = {}, {}
    for step in (ordinary_step, layerwise_step):
        # Donated, so that parameters and states are updated in place.
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, states, tokens).compile()
        memory: Any = compiled.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        name = step.__name__.removesuffix("_step")
        steps[name], peaks[name] = compiled, peak / 1e6
        print(f"{name:<12}{memory.temp_size_in_bytes / 1e6:>15.1f}{peaks[name]:>11.1f}")

    key, losses = jax.random.key(1), []
    for i in range(args.steps):
        limit = len(corpus.train) - CONTEXT - 1
        starts = jax.random.randint(jax.random.fold_in(key, i), (BATCH, 1), 0, limit)
        windows = corpus.train[starts + jnp.arange(CONTEXT + 1)[None]]
        params, states, loss = steps["layerwise"](params, states, windows)
        losses.append(float(loss))
        recent = sum(losses[-10:]) / len(losses[-10:])
        if i % 10 == 9 or i + 1 == args.steps:
            print(f"step {i + 1:>4}: loss {recent:.3f}", flush=True)
    print(f"letter frequencies alone: {corpus.entropy:.3f}")

    assert peaks["layerwise"] < peaks["ordinary"], peaks
    if args.steps >= 60:  # fewer are too few to learn more than that
        assert recent < corpus.entropy, losses


if __name__ == "__main__":
    main()
