"""An Equinox transformer with a convolution, and its layers as one module with `filter_vmap`."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _check import check

import curvax

SYMBOLS, WIDTH, LENGTH, LAYERS = 17, 32, 16, 3


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[1])

    def __call__(self, x, mask):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(x)


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    stem: eqx.nn.Conv1d
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(SYMBOLS, WIDTH, key=keys[0])
        self.stem = eqx.nn.Conv1d(WIDTH, WIDTH, 3, padding=((2, 0),), use_bias=False, key=keys[1])
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[2], LAYERS))
        self.head = eqx.nn.Linear(WIDTH, SYMBOLS, key=keys[3])

    def __call__(self, tokens):
        x = self.stem(jax.vmap(self.embedding)(tokens).T).T
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, static)(x, mask), None), x, arrays)
        return jax.vmap(self.head)(x)


params, static = eqx.partition(Transformer(jax.random.key(1)), eqx.is_inexact_array)


def loss_of(params, key):
    start = jax.random.randint(key, (8, 1), 0, SYMBOLS)
    tokens = (start + 3 * jnp.arange(LENGTH + 1)) % SYMBOLS
    logits = jax.vmap(eqx.combine(params, static))(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# Nothing else tells the convolution from a stack of 32 layers.
axes = {"stem/weight": curvax.MatrixAxes((1, 2), 0)}
rule = dataclasses.replace(curvax.rules.equinox, output_layer="auto", weight_dimension_numbers=axes)
check("equinox", curvax.soap(3e-3, refresh=5, matrices=rule), params, loss_of)
