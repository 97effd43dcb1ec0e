"""Refuses optimizers whose update of one layer depends on the gradients of others.

A layer-wise step hands an optimizer one layer at a time. That is right for everything that works
matrix by matrix or element by element, and wrong for a norm over the whole tree, as in
`optax.clip_by_global_norm`: it would be the norm of one layer. Such a norm is a number without
axes that depends on gradients, and on which updates depend. Nothing else in an optimizer has this
form: statistics of matrices keep the axis of their batch, and a guard asks only whether a sum is
finite. The same holds for numbers that the state keeps for all layers, unless its class says how
those of the layers combine. And refreshes that are staggered over the matrices of all layers are
not those that are staggered over the matrices of one.

*Limits.* Loops are not looked into: the numbers without axes inside belong to one matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._recording import recording
from ..refresh._due import Staggered
from ._layer_states import LayerStates

_FREE, _GRADIENT, _NUMBER = range(3)  # what a value depends on


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
    gradients = len(jax.tree.leaves(states.one))
    inputs = [_GRADIENT] * gradients + [_FREE] * (len(closed.jaxpr.invars) - gradients)
    if _NUMBER in _followed(closed.jaxpr, inputs):
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


def _followed(jaxpr: Any, inputs: list[int]) -> list[int]:
    """What each output of a program depends on."""
    known = dict.fromkeys(jaxpr.constvars, _FREE) | dict(zip(jaxpr.invars, inputs, strict=True))

    def of(x: Any) -> int:
        return _FREE if hasattr(x, "val") else known[x]

    for equation in jaxpr.eqns:
        given = [of(x) for x in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        if inner is not None:
            results = _followed(inner.jaxpr, given)
        elif equation.primitive.name == "is_finite":
            results = [min(_GRADIENT, max(given))]
        else:
            results = [max(given, default=_FREE)] * len(equation.outvars)
        for x, result in zip(equation.outvars, results, strict=True):
            number = x.aval.shape == () and jnp.issubdtype(x.aval.dtype, jnp.floating)
            known[x] = _NUMBER if result == _GRADIENT and number else result
    return [of(x) for x in jaxpr.outvars]
