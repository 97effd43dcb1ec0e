"""What a task is, on which we compare optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

EVALUATIONS = 20


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
