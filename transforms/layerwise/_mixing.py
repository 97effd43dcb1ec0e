"""Refuses optimizers whose update of one layer depends on other layers.

The update is traced for a number of layers that divides no other axis (`_recognizable`). So the
size of an array tells whether it has the layer axis. A floating array without it that depends on
gradients, parameters or the state of the layers mixes layers, and updates must not depend on it. (A
guard may: it asks only whether a sum is finite.) An array that the state keeps for all layers must
not depend on them either, unless its class says how those of the layers combine.

A slice of an array of all layers, which a loop takes in its turn, belongs to a layer. A sum over
the rounds of a loop mixes layers like any other. The number of rounds does not count as an
influence, and the analysis does not look into kernels and mapped functions of meshes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._layer_states import LayerStates, layer_states

NOTHING, LAYER, LAYERS, MIXED, RANDOM = range(5)
"""The kinds of dependence of a value.

`LAYER` is a slice, or the output of a loop for it; `LAYERS` an array of all layers; `MIXED` a
floating array without the layer axis that depends on all layers; `RANDOM` random numbers for all
layers from a key without the layer axis.
"""


def check_layers_are_independent(
    optimizer: Any, layers: Any, states: LayerStates, extra_args: dict[str, Any]
) -> None:
    """Requires an optimizer to treat each layer by itself."""
    if states.number == 1:
        return
    number = _recognizable(states)
    more = jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), layers)
    traced = layer_states(optimizer, more, number)
    per_layer, common = traced.parts(traced.whole, traced.whole)

    def update(gradients: Any, params: Any, per_layer: Any, common: Any) -> Any:
        state = traced.restored(traced.whole, per_layer, common)
        updates, new = optimizer.update(gradients, state, params, **extra_args)
        return updates, traced.undeclared(new)

    given = more, more, per_layer, common
    try:
        jaxpr, shapes = jax.make_jaxpr(update, return_shape=True)(*given)
    except Exception as error:
        error.add_note(
            f"curvax.layerwise traced the update for {number} layers, to see whether the optimizer "
            f"treats each by itself; there are {states.number}."
        )
        raise
    of_layers = [LAYERS] * len(jax.tree.leaves(given[:3]))
    known = of_layers + [NOTHING] * len(jax.tree.leaves(common))
    found = _Dependences(number).results(jaxpr.jaxpr, known)
    of_updates = len(jax.tree.leaves(shapes[0]))
    updates, kept = max(found[:of_updates]), max(found[of_updates:], default=NOTHING)
    if RANDOM in found:
        raise ValueError(
            "optimizer: its updates are random, and every layer would get the same random numbers, "
            "because the key in the state has no layer axis, as in optax.add_noise. Use an "
            "ordinary step, or a call for each layer with stacked=False and a state of its own."
        )
    if updates == MIXED or kept != NOTHING:
        raise ValueError(
            "optimizer: its updates depend on a number computed from all gradients, parameters or "
            "states, such as the norm in optax.clip_by_global_norm, or on a state that all layers "
            "share, as in optax.sm3. A layer-wise step has one layer at a time. Use "
            "curvax.clip_by_last_norm, which clips by the norm of the step before; a call for each "
            "layer with stacked=False, which takes each norm over one layer; or an ordinary step."
        )


def _recognizable(states: LayerStates) -> int:
    """A prime near the number of layers that divides no axis of one layer.

    If there is one, it is between the same sizes as the number of layers, because optimizers like
    Adafactor choose axes by their sizes. Otherwise it is above.
    """
    sizes = {n for x in jax.tree.leaves((states.one, states.single)) for n in x.shape if n > 1}
    largest = min((n for n in sizes if n >= states.number), default=math.inf)
    smallest = max((n for n in sizes if n < states.number), default=4) + 1

    def fits(number: int) -> bool:
        smaller = range(2, math.isqrt(number) + 1)
        return all(number % i for i in smaller) and all(n % number for n in sizes)

    upwards = itertools.takewhile(lambda n: n <= largest, itertools.count(states.number))
    downwards = range(states.number - 1, smallest - 1, -1)
    return next(filter(fits, itertools.chain(upwards, downwards, itertools.count(states.number))))


@dataclasses.dataclass(frozen=True)
class _Dependences:
    """Follows dependences through a jaxpr."""

    number: int  # of layers

    def results(self, jaxpr: Any, given: Sequence[int]) -> list[int]:
        """The dependences of the results of a jaxpr, from those of its inputs."""
        known = dict(zip(jaxpr.invars, given, strict=True))

        def of(x: Any) -> int:
            return NOTHING if hasattr(x, "val") else known.get(x, NOTHING)

        for equation in jaxpr.eqns:
            found = self._of_equation(equation, [of(x) for x in equation.invars])
            for x, result in zip(equation.outvars, found, strict=True):
                kind = x.aval
                reduced = jnp.issubdtype(kind.dtype, jnp.floating) and not self._has_layers(kind)
                known[x] = MIXED if result == LAYERS and reduced else result
        return [of(x) for x in jaxpr.outvars]

    def _has_layers(self, kind: Any) -> bool:
        return kind.size % self.number == 0

    def _of_equation(self, equation: Any, given: list[int]) -> list[int]:
        name, results = equation.primitive.name, equation.outvars
        most = max(given, default=NOTHING)
        if name == "optimization_barrier":
            return given
        if name == "is_finite":
            return [min(LAYERS, most)]
        if name == "random_bits" and most == NOTHING and self._has_layers(results[0].aval):
            return [RANDOM]
        if name == "dynamic_slice" and most == LAYERS:
            sizes = zip(equation.invars[0].aval.shape, results[0].aval.shape, strict=True)
            one = any(a % self.number == 0 != b % self.number for a, b in sizes)
            return [LAYER if one else LAYERS]
        if name == "cond":
            branches = [self.results(b, given[1:]) for b in _jaxprs_in(equation.params)]
            return [max(given[0], *each) for each in zip(*branches, strict=True)]
        if name in ("while", "scan"):
            return self._of_loop(equation, given)
        inner: Any
        for inner in _jaxprs_in(equation.params):
            if [x.aval.shape for x in inner.invars] == [x.aval.shape for x in equation.invars]:
                return self.results(inner, given)
        return [most] * len(results)

    def _of_loop(self, equation: Any, given: list[int]) -> list[int]:
        """The results of a loop, whose carry may come to depend on more in each round."""
        skipped = equation.params.get("cond_nconsts", 0)
        body: Any
        (body,) = _jaxprs_in(
            {"body": equation.params.get("body_jaxpr", equation.params.get("jaxpr"))}
        )
        given, outer = given[skipped:], [x.aval for x in equation.invars[skipped:]]
        over_layers = any(
            d == LAYERS and self._has_layers(x) for d, x in zip(given, outer, strict=True)
        )
        carried = sum(
            x.aval.ndim == y.aval.ndim for x, y in zip(body.outvars, equation.outvars, strict=True)
        )
        # The arguments are constants, the carry, and arrays of which each round gets a slice.
        is_slice = [x.ndim > y.aval.ndim for x, y in zip(outer, body.invars, strict=True)]
        end = len(given) - sum(is_slice)
        constants, carry = given[: end - carried], given[end - carried : end]
        slices = [
            LAYER if d == LAYERS and x.shape[0] % self.number == 0 else d
            for d, x in zip(given[end:], outer[end:], strict=True)
        ]
        while True:
            found = self.results(body, [*constants, *carry, *slices])
            after = [max(pair) for pair in zip(carry, found[:carried], strict=True)]
            if after == carry:
                return [LAYERS if over_layers and d == LAYER else d for d in found]
            carry = after


def _jaxprs_in(params: Any) -> Any:
    """The programs among the parameters of an equation."""
    from jax.extend.core import jaxprs_in_params  # jax.extend loads Pallas: 20 ms of an import

    return jaxprs_in_params(params)
