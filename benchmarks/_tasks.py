"""What a task on which we compare optimizers is, and a small one.

`lm` is the GPT of `examples/train_lm.py` on the Python language reference, character by character,
with the example's schedule and weight decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ._examples import example

train_lm = example("train_lm")
SOURCES = (Path(str(train_lm.__file__)),)
LM = {"steps": 200, "batch": 16, "context": 64, "width": 64, "depth": 2}
WINDOWS = 128  # for validation, spread over the example's
EVALUATIONS = 20
WEIGHT_DECAY = 0.01


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and how long it is trained."""

    name: str
    about: str  # for a page
    unit: str  # of the loss
    sizes: Mapping[str, Any]  # all that decides numbers
    width: int  # that ranks are a share of
    data: Any  # given to `loss_of`
    params: Callable[[jax.Array], Any]  # from a random key
    batches: Callable[[int], jax.Array]  # from a seed: (steps, batch) places in the data
    loss_of: Callable[[Any, Any, jax.Array], jax.Array]  # of parameters, data and places
    evaluate: Callable[[Any], jax.Array]  # loss on validation data
    test: Callable[[Any], dict[str, jax.Array]]  # what is looked at once, at the end
    evaluations: int = EVALUATIONS  # in a run

    @property
    def steps(self) -> int:
        """Of a run."""
        return self.sizes["steps"]

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // self.evaluations)

    def schedule(self) -> optax.Schedule:
        """The share of the learning rate: the schedule of `examples/train_lm.py`."""
        warmup = max(1, min(20, self.steps // 10))
        return optax.warmup_cosine_decay_schedule(
            init_value=1 / warmup,
            peak_value=1.0,
            warmup_steps=warmup,
            decay_steps=max(self.steps, warmup + 1),
        )


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def lm(text: str | None = None, **sizes: int) -> Task:
    """A GPT on characters; `text` is a file in the place of the example's."""
    sizes = LM | sizes
    corpus = train_lm.read_corpus(text, sizes["context"])
    config = train_lm.Config("", 1.0, corpus.digest, **sizes)
    stride = max(1, len(corpus.validation) // WINDOWS)
    windows = corpus.validation[: stride * WINDOWS : stride]

    def model(key: jax.Array) -> Any:
        return train_lm.GPT(dataclasses.replace(config, seed=key), corpus.symbols)  # type: ignore

    graph = nnx.graphdef(model(jax.random.key(0)))

    def loss_on(params: Any, windows: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(windows[:, :-1]), windows[:, 1:])

    def batches(seed: int) -> jax.Array:
        def starts(step: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), step)
            return jax.random.randint(key, (config.batch,), 0, len(corpus.train) - config.context)

        return jax.vmap(starts)(jnp.arange(config.steps))

    return Task(
        "lm",
        f"GPT of `examples/train_lm.py` with {config.depth} layers of width {config.width}, "
        f"{config.steps} steps of {config.batch} × {config.context} characters "
        f"({config.steps * config.batch * config.context / len(corpus.train):.2g} times the text); "
        f"loss on {len(windows)} windows of the held-out tenth",
        "nats per character",
        sizes | {"text": corpus.digest, "windows": len(windows)},
        config.width,
        corpus.train,
        jax.jit(lambda key: nnx.state(model(key), nnx.Param)),
        batches,
        lambda params, text, starts: loss_on(
            params, text[starts[:, None] + jnp.arange(config.context + 1)]
        ),
        jax.jit(lambda params: loss_on(params, windows)),
        lambda params: {},
    )
