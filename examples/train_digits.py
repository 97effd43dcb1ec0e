"""Flax Linen and `TrainState`: a small convolutional network reads handwritten digits.

    python examples/train_digits.py             # under a minute on two CPU cores

The 1797 images (8 × 8, from scikit-learn, no download) are real handwriting. A curvax optimizer
goes into `TrainState.create(tx=…)` like any other Optax optimizer, and recognizes the matrices in a
dict of Linen parameters: a convolution kernel `(height, width, in, out)` has `height·width·in` rows
and `out` columns; biases go to AdamW. The learning rates are reasonable but not tuned; for a
comparison see `train_lm.py`.
"""

import argparse
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import curvax

OPTIMIZERS = {
    "adamw": functools.partial(optax.adamw, 3e-3),
    "muon": functools.partial(curvax.muon, 1e-2),
    "racs": functools.partial(curvax.racs, 2e-2),
    "asgo": functools.partial(curvax.asgo, 1e-2, refresh=5),
}
BATCH = 64


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class Digits(NamedTuple):
    images: jax.Array  # (number, 8, 8, 1), from 0 to 1
    labels: jax.Array


def read_digits() -> tuple[Digits, Digits]:
    """The training images, and a random fifth of all images, held out for testing."""
    images, labels = load_digits(return_X_y=True)
    shuffled = np.random.default_rng(0).permutation(len(images))
    images = jnp.asarray(images[shuffled].reshape(-1, 8, 8, 1) / 16, jnp.float32)
    labels = jnp.asarray(labels[shuffled])
    return Digits(images[360:], labels[360:]), Digits(images[:360], labels[:360])


@functools.partial(jax.jit, donate_argnums=0)
def train_epoch(state: TrainState, digits: Digits, order: jax.Array) -> TrainState:
    """One pass over the images; `order` is `(batches, BATCH)`."""

    def step(state, batch):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, digits.images[batch])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits.labels[batch])
            return losses.mean()

        return state.apply_gradients(grads=jax.grad(loss_of)(state.params)), None

    return jax.lax.scan(step, state, order)[0]


@jax.jit
def accuracy(state: TrainState, digits: Digits) -> jax.Array:
    logits = state.apply_fn({"params": state.params}, digits.images)
    return (logits.argmax(-1) == digits.labels).mean()


def main() -> None:
    about = "Read handwritten digits, with one optimizer after the other."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--epochs", type=int, default=12, help="(%(default)s)")
    epochs = parser.parse_args().epochs
    if epochs < 1:
        parser.error(f"argument --epochs: must be 1 or more, not {epochs}")

    network = Network()
    train, test = read_digits()
    number = len(train.images)
    print(f"{number} images for training, {len(test.images)} for testing")
    print("optimizer   state MB   test accuracy after each epoch")
    accuracies = {}
    for name, make_optimizer in OPTIMIZERS.items():
        optimizer = make_optimizer(weight_decay=0.01)
        params = network.init(jax.random.key(0), train.images[:1])["params"]
        state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
        megabytes = curvax.state_bytes(optimizer, params) / 1e6
        print(f"{name:<9}{megabytes:>11.2f}", end="  ", flush=True)
        shuffle = np.random.default_rng(0)
        for _ in range(epochs):
            batches = number // BATCH
            order = shuffle.permutation(number)[: batches * BATCH].reshape(batches, BATCH)
            state = train_epoch(state, train, jnp.asarray(order))
            accuracies[name] = float(accuracy(state, test))
            print(f" {accuracies[name]:.3f}", end="", flush=True)
        print()

    assert min(accuracies.values()) > 0.9, accuracies


if __name__ == "__main__":
    main()
