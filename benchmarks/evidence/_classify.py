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
import optax
from flax import nnx
from sklearn.datasets import load_digits

from .._tasks import Task
from . import _texts
from ._finetune import STEPS, base, digest
from ._gpt import GPT
from ._language import EVALUATIONS, RECIPE

CLASSES, HELD_OUT = 10, 360


def classify(steps: int, first: int = STEPS, **sizes: int) -> Task:
    """From prose to digits; tested by accuracy on the same held-out images."""
    sizes = RECIPE | sizes
    batch, context, width = sizes["batch"], sizes["context"], sizes["width"]
    before = base(sizes, first)
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = jnp.asarray(digits.data[order] + ord("a"), jnp.int32)
    labels = jnp.asarray(digits.target[order])
    if images.shape[1] != context:
        raise ValueError(f"an image has {images.shape[1]} pixels, the model reads {context}")
    learned = images[HELD_OUT:], labels[HELD_OUT:]
    held_out = images[:HELD_OUT], labels[:HELD_OUT]
    shape = {name: sizes[name] for name in ("width", "heads", "depth")}
    graph = nnx.graphdef(GPT(_texts.SYMBOLS, context, **shape, rngs=nnx.Rngs(0)))

    def logits(params: Any, images: jax.Array) -> jax.Array:
        features = nnx.merge(graph, params["model"]).features(images)
        return features.reshape(*images.shape, width)[:, -1] @ params["classes"]["kernel"]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        found = logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

    def test(params: Any) -> dict[str, jax.Array]:
        return {"accuracy": (logits(params, held_out[0]).argmax(-1) == held_out[1]).mean()}

    def batches(seed: int) -> jax.Array:
        return jax.random.randint(jax.random.key(seed), (steps, batch), 0, len(learned[1]))

    return Task(
        name="classify",
        about=f"{steps} × {batch} handwritten digits, after {first} steps of prose",
        unit="nats per image",
        sizes={"steps": steps, "first": first, "base": digest(before), "held out": HELD_OUT},
        width=width,
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
