"""Finds optimizers whose update of one layer depends on the gradients of others.

A layer-wise step hands an optimizer one layer at a time. That is right for everything that works
matrix by matrix or element by element, and wrong for a norm over the whole tree, as in
`optax.clip_by_global_norm`: it would be the norm of one layer. Such a norm is a number without
axes that depends on gradients, and on which updates depend. Nothing else in an optimizer has this
form: statistics of matrices keep the axis of their batch, and a guard asks only whether a sum is
finite.

*Limits.* Loops are not looked into: the numbers without axes inside belong to one matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FREE, _GRADIENT, _NUMBER = range(3)  # what a value depends on


def mixes_layers(optimizer: Any, params: Any, state: Any) -> bool:
    """Whether an update depends on a floating number that the gradients of a tree determine."""
    closed, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    gradients = len(jax.tree.leaves(params))
    inputs = [_GRADIENT] * gradients + [_FREE] * (len(closed.jaxpr.invars) - gradients)
    updates = len(jax.tree.leaves(shapes[0]))
    return _NUMBER in _followed(closed.jaxpr, inputs)[:updates]


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
