"""Weight decay with one structure of the state, whether it is on or off."""

from __future__ import annotations

from typing import Any

import jax
import optax


def unless_zero(weight_decay: Any, decay: Any) -> optax.GradientTransformation:
    """`decay`, which adds weight decay; without effect if `weight_decay` is 0.

    The state is the same either way, so a checkpoint survives switching decay on or off. Without
    decay, `update` needs no parameters and reads none.
    """
    # An injected number is an array, which may change later.
    if not (isinstance(weight_decay, (int, float)) and weight_decay == 0):
        return decay

    def update(updates: Any, state: Any, params: Any = None):
        del params
        if jax.tree.leaves(state):  # a counter, which goes on
            _, state = decay.update(updates, state, updates)
        return updates, state

    return optax.GradientTransformation(decay.init, update)
