"""Language models as tasks: a GPT that reads bytes, from scratch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._training import Task, cross_entropy
from . import _texts
from ._gpt import GPT

WINDOWS = 512  # for validation, spread over the held-out text
BATCH = 64  # windows in a pass of the evaluation
EVALUATIONS = 5  # in a run; each takes as long as 15 steps
RECIPE = {"batch": 12, "context": 64, "width": 128, "heads": 4, "depth": 4}
"""nanoGPT's character-level recipe for a CPU, which trains for 2000 steps."""


def windows_of(text: np.ndarray, context: int, number: int = WINDOWS) -> jax.Array:
    """Windows `(number, context + 1)` at equal distances."""
    starts = np.linspace(0, len(text) - context - 1, number).astype(int)
    return jnp.asarray(text[starts[:, None] + np.arange(context + 1)])


def starts_of(length: int, steps: int, batch: int, context: int, seed: int) -> jax.Array:
    """Where the windows of each step start, `(steps, batch)`."""
    key = jax.random.key(seed)
    return jax.random.randint(key, (steps, batch), 0, length - context)


def language(text: str, steps: int, evaluations: int = EVALUATIONS, **sizes: int) -> Task:
    """A GPT on `prose` or `code`, in sizes of the recipe unless others are given."""
    batch, context, width, heads, depth = (RECIPE | sizes).values()
    corpus = _texts.read(text)
    held_out = windows_of(corpus.validation, context)
    places = jnp.arange(context + 1)

    def model(key: jax.Array) -> GPT:
        return GPT(_texts.SYMBOLS, context, width, heads, depth, nnx.Rngs(key))

    graph = nnx.graphdef(model(jax.random.key(0)))

    def loss_on(params: Any, windows: jax.Array) -> jax.Array:
        windows = windows.astype(jnp.int32)
        return cross_entropy(nnx.merge(graph, params)(windows[:, :-1]), windows[:, 1:].ravel())

    def evaluate(params: Any) -> jax.Array:
        parts = held_out.reshape(-1, BATCH, context + 1)
        return jax.lax.map(lambda part: loss_on(params, part), parts).mean()

    return Task(
        sizes={"text": corpus.digest, "steps": steps},
        data=jnp.asarray(corpus.train),
        params=jax.jit(lambda key: nnx.state(model(key), nnx.Param)),
        batches=lambda seed: starts_of(len(corpus.train), steps, batch, context, seed),
        loss_of=lambda params, data, starts: loss_on(params, data[starts[:, None] + places]),
        evaluate=jax.jit(evaluate),
        evaluations=evaluations,
    )
