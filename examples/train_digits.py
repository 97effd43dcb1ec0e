"""Flax Linen and `TrainState`: a small convolutional network reads handwritten digits.

    python examples/train_digits.py             # under a minute on two CPU cores

The 1797 images (8 × 8, from scikit-learn, no download) are real handwriting. A curvax optimizer
goes where any Optax optimizer goes, `TrainState.create(tx=…)`: it finds the matrices in a Linen
parameter dict by itself. A convolution kernel `(height, width, in, out)` is one of
`height·width·in` rows and `out` columns; biases are left to AdamW. The learning rates are
reasonable ones, not tuned: `train_lm.py` is the comparison.
"""

import argparse
import functools

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


# A fifth of the images, drawn at random, is kept for testing.
images, labels = load_digits(return_X_y=True)
shuffled = np.random.default_rng(0).permutation(len(images))
images = jnp.asarray(images[shuffled].reshape(-1, 8, 8, 1) / 16, jnp.float32)
labels = jnp.asarray(labels[shuffled])
train_images, test_images = images[360:], images[:360]
train_labels, test_labels = labels[360:], labels[:360]


@functools.partial(jax.jit, donate_argnums=0)
def train_epoch(state: TrainState, order: jax.Array) -> TrainState:
    """One pass over the training images; `order` is `(batches, BATCH)`."""

    def step(state, batch):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, train_images[batch])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, train_labels[batch])
            return losses.mean()

        return state.apply_gradients(grads=jax.grad(loss_of)(state.params)), None

    return jax.lax.scan(step, state, order)[0]


@jax.jit
def accuracy(state: TrainState) -> jax.Array:
    logits = state.apply_fn({"params": state.params}, test_images)
    return (logits.argmax(-1) == test_labels).mean()


parser = argparse.ArgumentParser(description="Read handwritten digits, once with each optimizer.")
parser.add_argument("--epochs", type=int, default=12, help="(%(default)s)")
epochs = parser.parse_args().epochs
if epochs < 1:
    parser.error(f"argument --epochs: must be 1 or more, not {epochs}")

network = Network()
print(f"{len(train_images)} images to learn from, {len(test_images)} to read")
print("optimizer   state MB   test accuracy after each epoch")
accuracies = {}
for name, make_optimizer in OPTIMIZERS.items():
    optimizer = make_optimizer(weight_decay=0.01)
    params = network.init(jax.random.key(0), train_images[:1])["params"]
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
    print(f"{name:<9}{curvax.state_bytes(optimizer, params) / 1e6:>11.2f}", end="  ", flush=True)
    shuffle = np.random.default_rng(0)
    for _ in range(epochs):
        batches = len(train_images) // BATCH
        order = shuffle.permutation(len(train_images))[: batches * BATCH].reshape(batches, BATCH)
        state = train_epoch(state, jnp.asarray(order))
        accuracies[name] = float(accuracy(state))
        print(f" {accuracies[name]:.3f}", end="", flush=True)
    print()

assert min(accuracies.values()) > 0.9, accuracies
