"""Classification: a GPT that has read prose learns to tell of which package a piece of code is.

The ten largest packages of the standard library are the classes. A new output layer, which starts
at zero, reads the mean of the features of a window.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .._tasks import Task
from . import _texts
from ._finetune import STEPS, base, digest
from ._gpt import GPT
from ._language import EVALUATIONS, RECIPE, WINDOWS

CLASSES = 10


@functools.cache
def pieces(context: int) -> tuple[list[str], np.ndarray, list[int], np.ndarray]:
    """Names; text to learn from, one package after the other; where each ends; what is held out.

    Args:
      context: bytes of a window. Held-out windows are `(classes, number, context)`.
    """
    packages = _texts.packages(CLASSES)
    train = [text.train for text in packages.values()]
    number = WINDOWS // CLASSES
    held_out = []
    for text in packages.values():
        starts = np.linspace(0, len(text.validation) - context, number).astype(int)
        held_out.append(text.validation[starts[:, None] + np.arange(context)])
    ends = np.cumsum([len(text) for text in train]).tolist()
    return list(packages), np.concatenate(train), ends, np.stack(held_out)


def classify(steps: int, first: int = STEPS, **sizes: int) -> Task:
    """From prose to packages; tested by accuracy on the same held-out windows."""
    sizes = RECIPE | sizes
    batch, context, width = sizes["batch"], sizes["context"], sizes["width"]
    before = base(sizes, first)
    names, text, ends, held_out = pieces(context)
    shape = {name: sizes[name] for name in ("width", "heads", "depth")}
    graph = nnx.graphdef(GPT(_texts.SYMBOLS, context, **shape, rngs=nnx.Rngs(0)))
    windows = jnp.asarray(held_out)
    known = jnp.broadcast_to(jnp.arange(CLASSES)[:, None], windows.shape[:2])
    begins = jnp.asarray([0, *ends[:-1]])
    lengths = jnp.asarray(ends) - begins

    def logits(params: Any, windows: jax.Array) -> jax.Array:
        features = nnx.merge(graph, params["model"]).features(windows.astype(jnp.int32))
        return features.reshape(*windows.shape, width).mean(1) @ params["classes"]["kernel"]

    def loss_of(params: Any, text: jax.Array, batch: jax.Array) -> jax.Array:
        labels, places = batch[:, 0], batch[:, 1]
        found = logits(params, text[places[:, None] + jnp.arange(context)])
        return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

    def of_held_out(params: Any) -> jax.Array:
        return jax.lax.map(lambda part: logits(params, part), windows)

    def evaluate(params: Any) -> jax.Array:
        found = of_held_out(params)
        return optax.softmax_cross_entropy_with_integer_labels(found, known).mean()

    def test(params: Any) -> dict[str, jax.Array]:
        return {"accuracy": (of_held_out(params).argmax(-1) == known).mean()}

    def batches(seed: int) -> jax.Array:
        of_label, of_place = jax.random.split(jax.random.key(seed))
        labels = jax.random.randint(of_label, (steps, batch), 0, CLASSES)
        share = jax.random.uniform(of_place, (steps, batch))
        places = begins[labels] + (share * (lengths[labels] - context)).astype(int)
        return jnp.stack([labels, places], -1)

    return Task(
        name="classify",
        about=f"packages of {steps} × {batch} windows of code, after {first} steps of prose",
        unit="nats per window",
        sizes={"steps": steps, "first": first, "base": digest(before), "packages": names},
        width=width,
        data=jnp.asarray(text),
        params=lambda key: {
            "model": jax.tree.map(jnp.copy, before),
            "classes": {"kernel": jnp.zeros((width, CLASSES))},
        },
        batches=batches,
        loss_of=loss_of,
        evaluate=jax.jit(evaluate),
        test=jax.jit(test),
        evaluations=EVALUATIONS,
    )
