"""Vision: a convolutional network on `mnist1d`, ten digits as procedural signals of 40 numbers.

After Greydanus and Kobak, "Scaling down deep learning with MNIST-1D" (arXiv:2011.14439): each
digit's template of 12 numbers is padded, scaled, sheared, shifted, and hidden in smooth noise. The
constants are ours.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.ndimage import gaussian_filter

from .._training import Task, cross_entropy

LENGTH, CLASSES = 40, 10
EXAMPLES = {"train": 40000, "validation": 1000, "test": 1000}
CHANNELS, WINDOW, BATCH = 48, 5, 64
TEMPLATES = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
"""The digits, each as the horizontal distances of a line that draws it; the mean is taken off."""


def signal(digit: int, random: np.random.Generator) -> np.ndarray:
    """One example."""
    template = (TEMPLATES[digit] - TEMPLATES[digit].mean()) / 6
    padded = np.concatenate([template, np.zeros(random.integers(36, 60))])
    padded = padded * (1 + 0.4 * random.standard_normal())
    padded = padded + 0.75 * random.random() * np.linspace(-0.07, 0.14, len(padded)) / 2
    padded = np.roll(padded, random.integers(0, 48))
    padded = padded + 0.25 * gaussian_filter(random.standard_normal(len(padded)), 2.0)
    places = np.linspace(0, len(padded) - 1, LENGTH)
    found = np.interp(places, np.arange(len(padded)), padded)
    return found + 0.02 * random.standard_normal(LENGTH)


@functools.cache
def examples() -> dict[str, tuple[jax.Array, jax.Array]]:
    """Signals and digits of each part, the signals in units of their standard deviation."""
    random = np.random.default_rng(42)
    found = {}
    for part, number in EXAMPLES.items():
        digits = np.arange(number) % CLASSES
        signals = np.stack([signal(digit, random) for digit in digits.tolist()])
        found[part] = jnp.asarray(signals / 0.17, jnp.float32), jnp.asarray(digits)
    return found


class Network(nnx.Module):
    """Three convolutions that halve the signal, and an output layer."""

    def __init__(self, rngs: nnx.Rngs):
        """Draws initial values."""
        conv = functools.partial(nnx.Conv, kernel_size=(WINDOW,), strides=2, rngs=rngs)
        self.conv_1, self.conv_2 = conv(1, CHANNELS), conv(CHANNELS, CHANNELS)
        self.conv_3 = conv(CHANNELS, CHANNELS)
        self.head = nnx.Linear(CHANNELS * LENGTH // 8, CLASSES, rngs=rngs)

    def __call__(self, signals: jax.Array) -> jax.Array:
        """`(batch, LENGTH)` to `(batch, CLASSES)`."""
        x = signals[..., None]
        for conv in (self.conv_1, self.conv_2, self.conv_3):
            x = nnx.relu(conv(x))
        return self.head(x.reshape(len(x), -1))


def vision(steps: int) -> Task:
    """Classification of signals; accuracy on a part that nothing else sees."""
    parts = examples()
    number = EXAMPLES["train"]
    graph = nnx.graphdef(Network(nnx.Rngs(0)))

    def loss_on(params: Any, part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(part[0]), part[1])

    def batches(seed: int) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), -(-steps * BATCH // number))
        order = jax.vmap(lambda key: jax.random.permutation(key, number))(keys)
        return order.ravel()[: steps * BATCH].reshape(steps, BATCH)

    def test(params: Any) -> dict[str, jax.Array]:
        right = nnx.merge(graph, params)(parts["test"][0]).argmax(-1) == parts["test"][1]
        return {"accuracy": right.mean()}

    return Task(
        sizes={"steps": steps, **EXAMPLES},
        data=parts["train"],
        params=jax.jit(
            lambda key: nnx.state(Network(nnx.Rngs(key)), nnx.Param)  # pyright: ignore
        ),
        batches=batches,
        loss_of=lambda params, data, places: loss_on(params, (data[0][places], data[1][places])),
        evaluate=jax.jit(lambda params: loss_on(params, parts["validation"])),
        test=jax.jit(test),
        evaluations=10,
    )
