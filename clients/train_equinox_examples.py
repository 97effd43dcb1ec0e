"""Models like those of Equinox' documentation: a convolutional network and a recurrent one.

Their modules are not filtered: functions and numbers of a module are leaves of the parameters that
`update` gets, as in the examples. Checkpoints are Equinox' own.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _check import check_restart, watched

import curvax

CLASSES = 10


class Images(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 12 * 12, 64, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(64, CLASSES, key=keys[2]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Spirals(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key, hidden_size=16):
        keys = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(2, hidden_size, key=keys[0])
        self.linear = eqx.nn.Linear(hidden_size, 2, use_bias=False, key=keys[1])
        self.bias = jnp.zeros(2)

    def __call__(self, points):
        start = jnp.zeros(self.hidden_size)
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, points)
        return self.linear(hidden) + self.bias


def images(key):
    """Classes by the angle of a wave."""
    labels, noise = (f(k, (32,)) for f, k in zip(DRAWS, jax.random.split(key), strict=True))
    rows, columns = jnp.mgrid[:28, :28] / 4
    angles = jnp.pi * labels / CLASSES
    phases = jnp.cos(angles)[:, None, None] * rows + jnp.sin(angles)[:, None, None] * columns
    return jnp.sin(phases + noise[:, None, None])[:, None], labels


def spirals(key):
    """Classes by the direction of rotation."""
    labels, noise = (f(k, (32,)) for f, k in zip(DRAWS, jax.random.split(key), strict=True))
    labels, steps = labels % 2, jnp.linspace(0, 2, 16)
    angles = noise[:, None] + steps * (2 * labels[:, None] - 1)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1) * steps[:, None], labels


DRAWS = (lambda key, shape: jax.random.randint(key, shape, 0, CLASSES), jax.random.normal)
MODELS = {"equinox_images": (Images, images), "equinox_spirals": (Spirals, spirals)}


def train(client: str, folder: Path, until: int):
    """Trains until so many steps, from the checkpoint in the folder."""
    make, batch = MODELS[client]
    model = make(jax.random.key(0))
    optimizer = watched(client, curvax.muon(0.03, matrices=curvax.rules.equinox))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    file, done = folder / "checkpoint.eqx", jnp.zeros((), int)
    if file.exists():
        model, state, done = eqx.tree_deserialise_leaves(file, (model, state, done))

    @eqx.filter_jit
    def step(model, state, key):
        def loss_of(model):
            x, labels = batch(key)
            logits = jax.vmap(model)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for i in range(int(done), until):
        model, state, loss = step(model, state, jax.random.key(i))
        losses.append(loss)
    eqx.tree_serialise_leaves(file, (model, state, jnp.asarray(until)))
    return losses, (eqx.filter(model, eqx.is_array), state)


check_restart(train, [*MODELS])
