"""Refuses optimizers whose update of one layer depends on the gradients of others.

A layer-wise step hands an optimizer one layer at a time. That is right for everything that works
matrix by matrix or element by element, and wrong for a norm over the whole tree (`_influence.py`).
The same holds for numbers that the state keeps for all layers, unless its class says how those of
the layers combine. And refreshes that are staggered over the matrices of all layers are not those
that are staggered over the matrices of one.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from .._influence import Influence, influences
from .._recording import recording
from ..refresh._due import Staggered
from ._layer_states import LayerStates


def check_layers_are_apart(optimizer: Any, states: LayerStates) -> None:
    """Requires an optimizer to treat each layer by itself.

    Raises:
      ValueError: if it computes a number from all gradients, or staggers refreshes.
    """
    if states.number == 1:
        return

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, new = optax.with_extra_args_support(optimizer).update(gradients, state, params)
        return updates, states.undeclared(new)

    with recording() as events:
        closed = jax.make_jaxpr(update)(states.one, states.single.state, states.one)
    if Influence.NUMBER in influences(closed, len(jax.tree.leaves(states.one))):
        raise ValueError(
            "optimizer: its updates depend on a number computed from all gradients, such as the "
            "norm in optax.clip_by_global_norm. A layer-wise step has the gradients of one layer "
            "at a time. Use curvax.clip_by_last_norm, which clips by the norm of the step before, "
            "or an ordinary step."
        )
    if any(isinstance(event, Staggered) for event in events):
        raise ValueError(
            "optimizer: refresh=curvax.every(…, stagger=True) distributes the matrices of all "
            "layers over the steps of its period, and a layer-wise step has one layer at a time. "
            "Use stagger=False, or an ordinary step."
        )
