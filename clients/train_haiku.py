"""A Haiku transformer with a convolution, and its layers in a `layer_stack`."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from _check import check

import curvax

SYMBOLS, WIDTH, LENGTH, LAYERS = 17, 32, 16, 3


def block(x):
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool))
    h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    init = hk.initializers.VarianceScaling()
    x = x + hk.MultiHeadAttention(4, WIDTH // 4, w_init=init)(h, h, h, mask=mask)
    return x + hk.nets.MLP([2 * WIDTH, WIDTH])(x)


def model(tokens):
    x = hk.Embed(SYMBOLS, WIDTH)(tokens)
    x = hk.Conv1D(WIDTH, 3, padding=hk.pad.causal, with_bias=False)(x)
    x = hk.experimental.layer_stack(LAYERS)(block)(x)
    return hk.Linear(SYMBOLS, name="head")(x)


transformed = hk.without_apply_rng(hk.transform(model))
params = transformed.init(jax.random.key(1), jnp.zeros((1, LENGTH), int))


def loss_of(params, key):
    start = jax.random.randint(key, (8, 1), 0, SYMBOLS)
    tokens = (start + 3 * jnp.arange(LENGTH + 1)) % SYMBOLS
    logits = transformed.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


check("haiku", curvax.muon(1e-2, matrices=curvax.rules.haiku), params, loss_of)
