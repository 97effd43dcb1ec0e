"""Refuses optimizers whose update of one layer depends on the gradients of others.

A layer-wise step hands an optimizer one layer at a time. That is right for everything that works
matrix by matrix or element by element, and wrong for a norm over the whole tree, as in
`optax.clip_by_global_norm`. Such a norm is a number without axes that depends on gradients, and on
which updates depend. Nothing else in an optimizer has this form: statistics of matrices keep the
axis of their batch, and a guard asks only whether a sum is finite. The same holds for numbers that
the state keeps for all layers, unless its class says how those of the layers combine.

*Limits.* Loops are not looked into: the numbers without axes inside belong to one matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._layer_states import LayerStates

NOTHING, GRADIENT, NUMBER = range(3)
"""What a value depends on; a number is one without axes that depends on gradients."""


def check_layers_are_apart(optimizer: Any, states: LayerStates) -> None:
    """Requires an optimizer to treat each layer by itself.

    Raises:
      ValueError: if it computes a number from all gradients.
    """
    if states.number == 1:
        return

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, new = optax.with_extra_args_support(optimizer).update(gradients, state, params)
        return updates, states.undeclared(new)

    jaxpr = jax.make_jaxpr(update)(states.one, states.single, states.one).jaxpr
    gradients = jaxpr.invars[: len(jax.tree.leaves(states.one))]
    if NUMBER in _followed(jaxpr, dict.fromkeys(gradients, GRADIENT)):
        raise ValueError(
            "optimizer: its updates depend on a number computed from all gradients, such as the "
            "norm in optax.clip_by_global_norm. A layer-wise step has the gradients of one layer "
            "at a time. Use curvax.clip_by_last_norm, which clips by the norm of the step before, "
            "or an ordinary step."
        )


def _followed(jaxpr: Any, known: dict[Any, int]) -> list[int]:
    """The dependences of the results of a jaxpr, from those of its inputs."""

    def of(x: Any) -> int:
        return NOTHING if hasattr(x, "val") else known.get(x, NOTHING)

    for equation in jaxpr.eqns:
        given = [of(x) for x in equation.invars]
        results = [max(given, default=NOTHING)] * len(equation.outvars)
        if equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"].jaxpr
            results = _followed(inner, dict(zip(inner.invars, given, strict=True)))
        elif equation.primitive.name == "is_finite":
            results = [min(GRADIENT, *results)]
        for x, result in zip(equation.outvars, results, strict=True):
            number = x.aval.shape == () and jnp.issubdtype(x.aval.dtype, jnp.floating)
            known[x] = NUMBER if result == GRADIENT and number else result
    return [of(x) for x in jaxpr.outvars]
