"""A whole training step of the language model of `examples/train_lm.py`, in a larger size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import optax

from ._examples import example
from ._timing import Program

train_lm = example("train_lm")
Make = Callable[..., optax.GradientTransformation]
SIZES = {"steps": 100, "batch": 32, "context": 64, "width": 128, "depth": 4}


def corpus_for(context: int = SIZES["context"]) -> Any:
    """The example's text."""
    return train_lm.read_corpus(None, context)


def training_step(make: Make, corpus: Any, **sizes: int) -> Program:
    """Loss, gradient, update and all else that the example computes in a step.

    Args:
      make: from a schedule and `weight_decay=` to the optimizer.
      corpus: from `corpus_for`.
      sizes: fields of the example's `Config` in the place of `SIZES`.
    """
    with mock.patch.dict(train_lm.OPTIMIZERS, this=make):
        config = train_lm.Config("this", 1e-3, corpus.digest, **(SIZES | sizes))
        state, step, _ = train_lm.make_run(config, corpus)
    return Program(lambda state, text: (step(state, text), ()), state, corpus.train)
