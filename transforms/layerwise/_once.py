"""Refuses weights that two backward passes of one step would update.

A backward pass has the gradients of its own call only. Where two parts share a weight, and where a
step has several losses or micro-batches, each pass would update the old weight by its part of the
gradient, and the step would keep one of the results. Within a traced step, a weight is one tracer.
"""

from __future__ import annotations

import weakref
from typing import Any

from jax.core import Tracer

from .._paths import named_leaves

_UPDATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def check_updated_once(layers: Any) -> None:
    """Notes that a backward pass updates these weights.

    Raises:
      ValueError: naming the parameter, if another one did in this step.
    """
    for name, leaf in named_leaves(layers).present().items():
        if not isinstance(leaf, Tracer):
            continue
        if _UPDATED.get(id(leaf)) is leaf:
            raise ValueError(
                f"layers: two backward passes of this step update the parameter {name!r}, each "
                "with its own part of the gradient. Weights that two parts share, several losses, "
                "and gradients summed over micro-batches need an ordinary step."
            )
        _UPDATED[id(leaf)] = leaf
