"""Whether updates depend on a number computed from all gradients.

Optimizers that are handed a part of the matrices at a time must work matrix by matrix or element by
element. A norm over the whole tree, as in `optax.clip_by_global_norm`, would become the norm of the
part. Such a norm is a number without axes that depends on gradients, and on which updates depend.
Nothing else in an optimizer has this form: statistics of matrices keep the axis of their batch, and
a guard asks only whether a sum is finite.

*Limits.* Loops are not looked into: the numbers without axes inside belong to one matrix.
"""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp


class Influence(enum.IntEnum):
    """What a value depends on."""

    NONE = 0
    GRADIENT = 1
    NUMBER = 2  # a number without axes that depends on gradients


def influences(closed: Any, gradients: int) -> list[Influence]:
    """What each output of a closed jaxpr depends on, whose first inputs are the gradients."""
    inputs = [Influence.GRADIENT] * gradients
    inputs += [Influence.NONE] * (len(closed.jaxpr.invars) - gradients)
    return _followed(closed.jaxpr, inputs)


def _followed(jaxpr: Any, inputs: list[Influence]) -> list[Influence]:
    known = dict.fromkeys(jaxpr.constvars, Influence.NONE)
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def of(x: Any) -> Influence:
        return Influence.NONE if hasattr(x, "val") else known[x]

    for equation in jaxpr.eqns:
        given = [of(x) for x in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        if inner is not None:
            results = _followed(inner.jaxpr, given)
        elif equation.primitive.name == "is_finite":
            results = [min(Influence.GRADIENT, max(given))]
        else:
            results = [max(given, default=Influence.NONE)] * len(equation.outvars)
        for x, result in zip(equation.outvars, results, strict=True):
            number = x.aval.shape == () and jnp.issubdtype(x.aval.dtype, jnp.floating)
            known[x] = Influence.NUMBER if result == Influence.GRADIENT and number else result
    return [of(x) for x in jaxpr.outvars]
