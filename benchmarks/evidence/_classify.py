"""Classification: a GPT that has read prose learns handwritten digits.

The 1797 images of scikit-learn's labelled set are read pixel by pixel: 8 × 8 brightnesses from 0 to
16, as the letters from `a` to `q`. A new output layer, which starts at zero, reads the features of
the last one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

from .._training import Task, cross_entropy
from . import _texts
from ._finetune import STEPS, base, digest
from ._gpt import GPT
from ._language import EVALUATIONS, RECIPE

CLASSES, HELD_OUT = 10, 360


def classify(steps: int, first: int = STEPS, **sizes: int) -> Task:
    """From prose to digits; tested by accuracy on the same held-out images."""
    sizes = RECIPE | sizes
    batch, context, width, heads, depth = sizes.values()
    before = base(sizes, first)
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = jnp.asarray(digits.data[order] + ord("a"), jnp.int32)
    labels = jnp.asarray(digits.target[order])
    if images.shape[1] != context:
        raise ValueError(f"an image has {images.shape[1]} pixels, the model reads {context}")
    learned = images[HELD_OUT:], labels[HELD_OUT:]
    held_out = images[:HELD_OUT], labels[:HELD_OUT]
    graph = nnx.graphdef(GPT(_texts.SYMBOLS, context, width, heads, depth, nnx.Rngs(0)))

    def logits(params: Any, images: jax.Array) -> jax.Array:
        features = nnx.merge(graph, params["model"]).features(images)
        return features.reshape(*images.shape, width)[:, -1] @ params["classes"]["kernel"]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits(params, images), labels)

    def test(params: Any) -> dict[str, jax.Array]:
        return {"accuracy": (logits(params, held_out[0]).argmax(-1) == held_out[1]).mean()}

    def batches(seed: int) -> jax.Array:
        return jax.random.randint(jax.random.key(seed), (steps, batch), 0, len(learned[1]))

    return Task(
        sizes={"steps": steps, "first": first, "base": digest(before), "held out": HELD_OUT},
        data=learned,
        params=lambda key: {
            "model": jax.tree.map(jnp.copy, before),
            "classes": {"kernel": jnp.zeros((width, CLASSES))},
        },
        batches=batches,
        loss_of=lambda params, data, batch: loss(params, *(x[batch] for x in data)),
        evaluate=jax.jit(lambda params: loss(params, *held_out)),
        test=jax.jit(test),
        evaluations=EVALUATIONS,
    )
