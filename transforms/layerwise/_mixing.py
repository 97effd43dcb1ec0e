"""Refuses optimizers whose update of one layer depends on other layers.

The update is traced for two numbers of layers that divide no other axis (`_recognizable`), so that
the size of an array tells whether it has the layer axis, and for a small even one. A number that
does not stand in all programs depends on how many layers there are. `_dependences.py` follows both.
An even number between the two shows what the program computes for odd ones only (`operations_in`).
An array that the state keeps for all layers must not depend on them either, unless its class says
how those of the layers combine.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _dependences as kinds
from ._dependences import Dependences, operations_in, values_in
from ._layer_states import LayerStates, layer_states


def check_layers_are_independent(
    optimizer: Any, layers: Any, states: LayerStates, extra_args: dict[str, Any]
) -> None:
    """Requires an optimizer to treat each layer by itself."""
    if states.number == 1:
        return
    first = _recognizable(states)
    numbers = first, _recognizable(states, first)
    trace = functools.partial(_program, optimizer, layers, states.number, extra_args)
    programs = [trace(n) for n in numbers]
    _, shapes, (*of_layers, common) = programs[0]
    known = [
        kinds.LAYERS if jnp.issubdtype(x.dtype, jnp.inexact) else kinds.COUNTS
        for x in jax.tree.leaves(of_layers)
    ]
    known += [kinds.NOTHING] * len(jax.tree.leaves(common))
    values = [values_in(jaxpr) for jaxpr, *_ in (*programs, trace(_least(states)))]
    even = _between(_sizes(states), numbers)
    one, other = (operations_in(jaxpr) for jaxpr, *_ in programs)
    by_parity = even is not None and one == other != operations_in(trace(even)[0])
    common_values = set.intersection(*values)
    each = [
        Dependences(n, here - common_values).results(jaxpr, known)
        for n, (jaxpr, *_), here in zip(numbers, programs, values, strict=False)
    ]
    # What looks like layers for one number only, such as a table of a schedule, is none.
    results = [min(pair) for pair in zip(*each, strict=True)]
    of_updates = len(jax.tree.leaves(shapes[0]))
    updates = max(results[:of_updates])
    kept = any(
        kind == kinds.NUMBER or (kind != kinds.NOTHING and jnp.issubdtype(x.dtype, jnp.floating))
        for kind, x in zip(results[of_updates:], shapes[1], strict=True)
    )
    if kinds.RANDOM in results:
        raise ValueError(
            "optimizer: its updates are random, and every layer would get the same random numbers, "
            "because the key in the state has no layer axis, as in optax.add_noise. Use an "
            "ordinary step, or a call for each layer with stacked=False and a state of its own."
        )
    if updates == kinds.MIXED or kept or by_parity:
        raise ValueError(
            "optimizer: its updates depend on a number computed from all gradients, parameters or "
            "states, such as the norm in optax.clip_by_global_norm, on a state that all layers "
            "share, as in optax.sm3, or on the index or the number of layers, as linspace or "
            "x / len(x) over their axis. A layer-wise step has one layer at a time. Use "
            "curvax.clip_by_last_norm, which clips by the norm of the step before; a call for each "
            "layer with stacked=False, which takes each norm over one layer; the number itself; "
            "or an ordinary step."
        )


def _program(
    optimizer: Any, layers: Any, actual: int, extra_args: dict[str, Any], number: int
) -> tuple[Any, Any, Any]:
    """The update for so many layers in place of the actual number, its results, and its input."""
    more = jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), layers)
    traced = layer_states(optimizer, more, number)
    per_layer, common = traced.parts(traced.whole, traced.whole)

    def update(gradients: Any, params: Any, per_layer: Any, common: Any) -> Any:
        state = traced.restored(traced.whole, per_layer, common)
        updates, new = optimizer.update(gradients, state, params, **extra_args)
        return updates, traced.undeclared(new)

    inputs = more, more, per_layer, common
    try:
        return *jax.make_jaxpr(update, return_shape=True)(*inputs), inputs
    except Exception as error:
        error.add_note(
            f"curvax.layerwise traced the update for {number} layers, to see whether the optimizer "
            f"treats each by itself; there are {actual}."
        )
        raise


def _least(states: LayerStates) -> int:
    """The least even number of layers between the same sizes, which bounds and roots tell apart."""
    smallest = max((n for n in _sizes(states) if n < states.number), default=1) + 1
    return smallest + smallest % 2


def _between(sizes: set[int], numbers: Sequence[int]) -> int | None:
    """An even number of layers between two odd ones, which no bound tells apart from both."""
    between = range(min(numbers) + 1, max(numbers), 1 + min(numbers) % 2)
    return next((n for n in between if n not in sizes), None)


def _sizes(states: LayerStates) -> set[int]:
    """Those of the axes of a layer and its state."""
    return {n for x in jax.tree.leaves((states.one, states.single)) for n in x.shape if n > 1}


def _recognizable(states: LayerStates, besides: int = 0) -> int:
    """A prime near the number of layers, `besides` another, that divides no axis of one layer.

    If there is one, it is between the same sizes as the number of layers, because optimizers like
    Adafactor choose axes by their sizes. Otherwise it is above.
    """
    sizes = _sizes(states)
    largest = min((n for n in sizes if n >= states.number), default=math.inf)
    smallest = max((n for n in sizes if n < states.number), default=4) + 1

    def fits(number: int) -> bool:
        smaller = range(2, math.isqrt(number) + 1)
        divides_none = number != besides and all(n % number for n in sizes)
        apart = min(number, besides) < 3 or _between(sizes, (number, besides)) is not None
        return apart and divides_none and all(number % i for i in smaller)

    upwards = itertools.takewhile(lambda n: n <= largest, itertools.count(states.number))
    downwards = range(states.number - 1, smallest - 1, -1)
    return next(filter(fits, itertools.chain(upwards, downwards, itertools.count(states.number))))
