"""nanoGPT's model in Flax NNX: its layers, its initial values, its tied output layer.

Pre-norm blocks with LayerNorm without biases, learned positions, GELU, an output layer that is the
token embedding; initial values with a standard deviation of 0.02, those that end a residual branch
divided by `√(2 depth)`. Dropout is 0. Queries, keys and values are three matrices, as in Flax.

Between the layers, tokens are rows of one matrix: XLA computes the gradient of a kernel on a CPU
half as fast where batch and time are two axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

STANDARD = nnx.initializers.normal(0.02)


def linear(rows: int, columns: int, rngs: nnx.Rngs, init: nnx.Initializer = STANDARD) -> nnx.Linear:
    """A layer without bias."""
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int, last: nnx.Initializer, rngs: nnx.Rngs):
        """With `last` as the initial values of the output."""
        self.heads = heads
        self.query, self.key, self.value = (linear(width, width, rngs) for _ in range(3))
        self.out = linear(width, width, rngs, last)

    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """`(batch · context, width)` to the same."""
        context = x.shape[0] // batch
        q, k, v = (
            layer(x).reshape(batch, context, self.heads, -1).swapaxes(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        places = jnp.arange(context)
        scores = jnp.where(places[:, None] >= places, q @ k.mT / q.shape[-1] ** 0.5, -1e30)
        seen = (jax.nn.softmax(scores) @ v).swapaxes(1, 2)
        return self.out(seen.reshape(x.shape))


class Block(nnx.Module):
    """Attention and a perceptron, each on a residual branch."""

    def __init__(self, width: int, heads: int, depth: int, rngs: nnx.Rngs):
        """One block of a model with `depth` blocks."""
        last = nnx.initializers.normal(0.02 / (2 * depth) ** 0.5)
        self.norm1 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.attention = Attention(width, heads, last, rngs)
        self.norm2 = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.up = linear(width, 4 * width, rngs)
        self.down = linear(4 * width, width, rngs, last)

    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """`(batch · context, width)` to the same."""
        x = x + self.attention(self.norm1(x), batch)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """From tokens to logits."""

    def __init__(
        self, symbols: int, context: int, width: int, heads: int, depth: int, rngs: nnx.Rngs
    ):
        """The sizes, and where initial values come from."""
        self.tokens = nnx.Embed(symbols, width, embedding_init=STANDARD, rngs=rngs)
        self.positions = nnx.Embed(context, width, embedding_init=STANDARD, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, depth, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)

    def features(self, tokens: jax.Array) -> jax.Array:
        """`(batch, context)` to `(batch · context, width)`: the input of the output layer."""
        batch, context = tokens.shape
        x = self.tokens(tokens) + self.positions(jnp.arange(context))
        x = x.reshape(batch * context, -1)
        for block in self.blocks:
            x = block(x, batch)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`(batch, context)` to `(batch · context, symbols)`."""
        return self.tokens.attend(self.features(tokens))
