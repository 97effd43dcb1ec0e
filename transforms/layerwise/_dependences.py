"""What the values in a program for all layers depend on.

An array without the layer axis that depends on gradients, parameters or the state of the layers
mixes layers, and updates must not depend on it. (A guard may: it asks only whether a sum is
finite.)

A slice of an array of all layers, which a loop takes in its turn, belongs to a layer, and so does
what is computed from it, but not for all layers again. A number that goes on from round to round or
counts the rounds, flags of all layers, conditions of loops, indices along the axis of layers, their
number, what runs along their axis, such as a cumulative sum, and reshapes that move it mix layers.
Flags and indices that only order work are `declared` (`linalg/_numerics.py`). Kernels and callbacks
count as mixing; the analysis does not look into mapped functions of meshes.
"""

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

NOTHING, NUMBER, INDEX, COUNTS, LAYER, LAYERS, MIXED, RANDOM = range(8)
"""The kinds of dependence of a value.

`NUMBER` depends on how many layers there are; `INDEX` counts along their axis, as the indices of
slices do; `COUNTS` are integers of the state, such as counters of all layers, of which sums only
decide what is due; `LAYER` is a slice, or the output of a loop for it; `LAYERS` an array of all
layers; `MIXED` what depends on all layers and has no layer axis; `RANDOM` random numbers for all
layers from a key without the layer axis.
"""

DRAWS = ("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32")
"""Primitives that draw numbers from their first argument."""

OPAQUE = ("pure_callback", "io_callback", "ffi_call")
"""Primitives of which nothing is known."""

MOVES = ("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice")
MOVES += ("gather", "pad", "reshape", "scatter", "select_n", "slice", "split", "squeeze")
MOVES += ("transpose",)
"""Primitives that only move numbers, as the parts of a loop in batches are cut and joined."""

SLICES = {"dynamic_slice": (), "dynamic_update_slice": (1,), "gather": (), "scatter": (2,)}
"""Primitives that an index may enter and not the numbers, with the places of new numbers."""


Value = tuple[Any, bytes]
"""Where numbers stand in a program, and they: as bytes, because NaN is not equal to itself."""


def values_in(jaxpr: Any) -> set[Value]:
    """The numbers and arrays in a program."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = (x for x in getattr(jaxpr, "consts", ()) if not isinstance(x, Tracer))
    values = {_value("", x) for x in consts}
    for equation in inner.eqns:
        name, arguments = equation.primitive.name, equation.invars
        values |= {_value((name, i), x.val) for i, x in enumerate(arguments) if hasattr(x, "val")}
        values.update(_parameters(equation), *map(values_in, _jaxprs_in(equation.params)))
    return values


def operations_in(jaxpr: Any) -> set[Any]:
    """What a program computes with floating numbers, along which axes, whatever their sizes."""
    found: set[Any] = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = list(map(operations_in, _jaxprs_in(equation.params)))
        arrays = [x.aval for x in (*equation.invars, *equation.outvars)]
        kinds = tuple(x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
        name, params = equation.primitive.name, equation.params
        along = ("axes", "axis", "dimension", "dimensions")
        axes = next((params[x] for x in along if params.get(x) is not None), ())
        from_end = [i - arrays[0].ndim for i in (axes if isinstance(axes, tuple) else (axes,))]
        if kinds and not inside and name not in MOVES:
            found.add((name, kinds, tuple(from_end)))
        found.update(*inside)
    return found


def _parameters(equation: Any) -> list[Value]:
    """A power, a number of entries or of rounds, padding, or the ends of a slice."""
    name, params = equation.primitive.name, equation.params
    numbers = ("k", "y", "length", "padding_config")
    found = [_value((name, x), params[x]) for x in numbers if x in params]
    if name == "slice":
        ends = zip(equation.invars[0].aval.shape, params["limit_indices"], strict=True)
        # The end of an axis is -1 for each of its lengths.
        places = params["start_indices"], [-1 if n == end else end for n, end in ends]
        found.append(_value(name, places))
    return found


def _value(place: Any, numbers: Any) -> Value:
    with jax.ensure_compile_time_eval():
        if isinstance(numbers, jax.Array) and jnp.issubdtype(numbers.dtype, jax.dtypes.prng_key):
            numbers = jax.random.key_data(numbers)
        return place, np.asarray(numbers).tobytes()


@dataclasses.dataclass(frozen=True)
class Dependences:
    """Follows dependences through a jaxpr."""

    number: int  # of layers
    only: Set[Value]  # the values of its program that those for other numbers do not all have

    def results(self, jaxpr: Any, kinds: Sequence[int]) -> list[int]:
        """The dependences of the results of a jaxpr, from those of its inputs."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(inner.invars, kinds, strict=True))
        for x, value in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False):
            known[x] = self._of_constant(value)

        def kind_of(x: Any, place: Any = "") -> int:
            return self._of_constant(x.val, place) if hasattr(x, "val") else known.get(x, NOTHING)

        made_by = {x: e for e in inner.eqns for x in e.outvars}
        for equation in inner.eqns:
            name = equation.primitive.name
            kinds = [kind_of(x, (name, i)) for i, x in enumerate(equation.invars)]
            if _counts_from_the_end(equation, made_by):
                kinds[2] = NOTHING
            if name != "scan" and self._follows(equation):
                kinds.append(NUMBER)
            results = self._of_equation(equation, kinds)
            for x, result in zip(equation.outvars, results, strict=True):
                reduced = result == LAYERS or (result == COUNTS and _is_floating(x))
                squared = sum(n % self.number == 0 for n in x.aval.shape if n) > 1
                least = NUMBER if squared else NOTHING  # one axis more follows the number of layers
                mixed = reduced and not self._has_layers(x.aval)
                known[x] = MIXED if mixed else max(result, least)
        return [kind_of(x) for x in inner.outvars]

    def _of_constant(self, value: Any, place: Any = "") -> int:
        """That of an array in the program: `INDEX` if its numbers differ from layer to layer."""
        if isinstance(value, Tracer) or 0 in np.shape(value):
            return NOTHING
        axes = [i for i, n in enumerate(np.shape(value)) if n % self.number == 0]
        if not axes:
            return NUMBER if _value(place, value) in self.only else NOTHING
        with jax.ensure_compile_time_eval():
            numbers = np.asarray(value)
        varies = any((numbers != numbers.take([0], axis=i)).any() for i in axes)
        return INDEX if varies else NOTHING

    def _ends_together(self, equation: Any, body: Any, kinds: list[int]) -> bool:
        """Whether the end of a loop depends on all layers, and with it its results.

        A loop under `vmap` goes on for all of them until the last one ends, but each round selects
        the entries that it still changes.
        """
        if "cond_jaxpr" not in equation.params:
            return False
        (condition,) = _jaxprs_in({"cond": equation.params["cond_jaxpr"]})
        if max(self.results(condition, kinds)) != MIXED:
            return False
        made_by = {x: e for e in body.eqns for x in e.outvars}
        selected = [
            x in made_by
            and made_by[x].primitive.name == "select_n"
            and self._has_layers(made_by[x].invars[0].aval)
            for x in body.outvars
        ]
        return not all(selected)

    def _rounds_follow_layers(self, equation: Any, kinds: list[int], slices: list[int]) -> bool:
        """Whether the number of rounds depends on the index or the number of layers."""
        length = equation.params.get("length")  # of a scan
        if length is not None:
            follows = length % self.number == 0 or self._follows(equation)
            return length > 0 and follows and max(slices, default=NOTHING) < LAYER
        (condition,) = _jaxprs_in({"cond": equation.params["cond_jaxpr"]})
        return self.results(condition, kinds)[0] in (NUMBER, INDEX)

    def _follows(self, equation: Any) -> bool:
        """Whether a parameter of an operation depends on the number of layers."""
        return not self.only.isdisjoint(_parameters(equation))

    def _has_layers(self, kind: Any) -> bool:
        return kind.size % self.number == 0

    def _is_along(self, x: Any, axis: int) -> bool:
        length = x.aval.shape[axis] if x.aval.ndim else 0
        return length > 0 and length % self.number == 0

    def _of_equation(self, equation: Any, kinds: list[int]) -> list[int]:
        name, results = equation.primitive.name, equation.outvars
        most = max(kinds, default=NOTHING)
        if name == "optimization_barrier":
            return kinds
        if name == "is_finite":
            return [NOTHING]
        if name in DRAWS and kinds[0] == NOTHING:
            drawn = any(self._has_layers(x.aval) for x in results)
            return [RANDOM if drawn else most] * len(results)
        if name == "iota":
            kinds = [INDEX if self._is_along(results[0], equation.params["dimension"]) else NOTHING]
            most = kinds[0]
        if name in OPAQUE and most >= COUNTS:
            return [MIXED] * len(results)
        if name in ("jit", "pjit") and equation.params["name"] == "declared":
            return [NOTHING]
        if name == "cond":
            branches = [self.results(b, kinds[1:]) for b in _jaxprs_in(equation.params)]
            chosen = MIXED if kinds[0] in (NUMBER, INDEX) else kinds[0]
            return [max(chosen, *each) for each in zip(*branches, strict=True)]
        if name in ("while", "scan"):
            return self._of_loop(equation, kinds)
        inner: Any
        for inner in _jaxprs_in(equation.params):
            if [x.aval.shape for x in inner.invars] == [x.aval.shape for x in equation.invars]:
                return self.results(inner, kinds)
        enters = most in (LAYER, LAYERS) or any(map(_is_floating, results))
        entering = [kinds[i] for i in SLICES.get(name, range(len(kinds)))]
        if ({NUMBER, INDEX} & {*entering} or self._begins_at_number(equation, kinds)) and enters:
            return [MIXED] * len(results)
        along = [
            (d, x)
            for d, x, axes in zip(kinds, equation.invars, _axes_along(equation), strict=False)
            if any(self._is_along(x, i) for i in axes)
        ]
        if any(d == LAYERS and _is_floating(x) for d, x in along):
            return [MIXED] * len(results)
        ones = [x for _, x in along]
        if not any(self._has_layers(x.aval) for x in results):  # what is filled up to a length
            ones += [x for x in equation.invars if self.number in x.aval.shape]
        if most == NOTHING and any(x.aval.dtype != jnp.bool_ for x in ones):
            return [NUMBER] * len(results)
        if most == LAYERS and name == "reshape" and self._moves_layers(equation):
            return [MIXED]
        if name == "dynamic_slice" and most in (COUNTS, LAYERS):
            in_turn = max(kinds[1:]) > NUMBER  # else it is the same layer in each round
            return [most if not self._is_of_one(equation) else LAYER if in_turn else MIXED]
        if LAYER in kinds and name not in SLICES and any(self._has_layers(x.aval) for x in results):
            return [MIXED] * len(results)  # one layer's for all of them
        return [most] * len(results)

    def _begins_at_number(self, equation: Any, kinds: list[int]) -> bool:
        """Whether a slice begins at the number of layers, along another axis than theirs."""
        if equation.primitive.name != "dynamic_slice":
            return False
        array, *_ = equation.invars
        return any(d == NUMBER and not self._is_along(array, i) for i, d in enumerate(kinds[1:]))

    def _is_of_one(self, equation: Any) -> bool:
        """Whether a slice of all layers is one of one layer."""
        sizes = zip(equation.invars[0].aval.shape, equation.outvars[0].aval.shape, strict=True)
        return any(a % self.number == 0 != b % self.number for a, b in sizes)

    def _moves_layers(self, equation: Any) -> bool:
        """Whether a reshape has other numbers of entries before the axis of the layers."""

        def entries_before(x: Any) -> set[int]:
            shape = x.aval.shape
            return {math.prod(shape[:i]) for i, n in enumerate(shape) if n % self.number == 0}

        return entries_before(equation.invars[0]) != entries_before(equation.outvars[0])

    def _takes_layers(self, body: Any) -> bool:
        """Whether a round of a loop takes one layer out of all, other than in loops inside."""
        for equation in getattr(body, "jaxpr", body).eqns:
            name = equation.primitive.name
            if name == "dynamic_slice" and self._is_of_one(equation):
                return True
            inside = () if name in ("while", "scan") else _jaxprs_in(equation.params)
            if any(map(self._takes_layers, inside)):
                return True
        return False

    def _of_loop(self, equation: Any, kinds: list[int]) -> list[int]:
        """The results of a loop, whose carry may come to depend on more in each round."""
        skipped = equation.params.get("cond_nconsts", 0)
        of_condition = kinds[:skipped]
        body: Any
        (body,) = _jaxprs_in(
            {"body": equation.params.get("body_jaxpr", equation.params.get("jaxpr"))}
        )
        kinds, outer = kinds[skipped:], [x.aval for x in equation.invars[skipped:]]
        over_layers = any(
            d == LAYERS and self._has_layers(x) for d, x in zip(kinds, outer, strict=True)
        )
        carried = sum(
            x.aval.ndim == y.aval.ndim for x, y in zip(body.outvars, equation.outvars, strict=True)
        )
        # The arguments are constants, the carry, and arrays of which each round gets a slice.
        is_slice = [x.ndim > y.aval.ndim for x, y in zip(outer, body.invars, strict=True)]
        end = len(kinds) - sum(is_slice)
        constants, carry = kinds[: end - carried], kinds[end - carried : end]
        slices = [
            LAYER if d in (COUNTS, LAYERS) and x.shape[0] % self.number == 0 else d
            for d, x in zip(kinds[end:], outer[end:], strict=True)
        ]
        turns = any(a == LAYER and d == LAYERS for a, d in zip(slices, kinds[end:], strict=True))
        turns = turns or self._takes_layers(body)
        if turns:  # what a round changes counts the layers
            before = body.invars[len(constants) :]
            pairs = zip(carry, before, body.outvars, strict=False)
            carry = [INDEX if d == NOTHING and x is not y else d for d, x, y in pairs]
        elif self._rounds_follow_layers(equation, [*of_condition, *carry], slices):
            return [MIXED if _is_floating(x) else INDEX for x in equation.outvars]
        while True:
            results = self.results(body, [*constants, *carry, *slices])
            if turns:  # a number that goes on from layer to layer
                results[:carried] = [
                    (MIXED if _is_floating(x) else INDEX)
                    if d == LAYER and not self._has_layers(x.aval)
                    else d
                    for d, x in zip(results[:carried], body.outvars, strict=False)
                ]
            after = [max(pair) for pair in zip(carry, results[:carried], strict=True)]
            if after == carry:
                if self._ends_together(equation, body, [*of_condition, *carry]):
                    return [MIXED] * len(results)
                return [LAYERS if over_layers and d == LAYER else d for d in results]
            carry = after


def _jaxprs_in(params: Any) -> Any:
    from jax.extend.core import jaxprs_in_params  # jax.extend loads Pallas: 20 ms of an import

    return jaxprs_in_params(params)


def _counts_from_the_end(equation: Any, made_by: dict[Any, Any]) -> bool:
    """Whether an index is chosen, or where it is negative its sum with the length of an axis."""
    if equation.primitive.name != "select_n" or len(equation.invars) != 3:
        return False
    _, index, shifted = equation.invars
    by = None if hasattr(shifted, "val") else made_by.get(shifted)
    return by is not None and by.primitive.name == "add" and by.invars[0] is index


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.inexact)


def _axes_along(equation: Any) -> list[Sequence[int]]:
    """For each argument, the axes along which the results depend on more than one entry."""
    name, params = equation.primitive.name, equation.params
    arguments = equation.invars
    if name == "dot_general":
        return list(params["dimension_numbers"][0])
    if name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        axes: Sequence[int] = (params["axis"],)
    elif name == "rev":
        axes = params["dimensions"]
    elif name == "sort":
        axes = (params["dimension"],)
    elif name == "fft":
        axes = range(-len(params["fft_lengths"]), 0)
    elif name.startswith(("reduce_", "arg")) and "axes" in params:
        axes = params["axes"]
    elif name in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        axes = [i for i, n in enumerate(params["window_dimensions"]) if n > 1]
    elif name in ("cholesky", "eigh", "eig", "qr", "geqrf", "svd", "triangular_solve", "lu"):
        axes = (-2, -1)
    elif name == "conv_general_dilated":
        batch = params["dimension_numbers"].lhs_spec[0]
        ranks = [x.aval.ndim for x in arguments]
        return [[i for i in range(ranks[0]) if i != batch], range(ranks[1])]
    elif name in ("top_k", "approx_top_k"):
        axes = (params.get("axis", params.get("reduction_dimension", -1)),)
    elif name == "gather":
        taken, sizes = params["dimension_numbers"].start_index_map, params["slice_sizes"]
        shape = arguments[0].aval.shape
        return [[axis for axis in taken if sizes[axis] < shape[axis]], ()]
    elif name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        places = [i for i in range(arguments[2].aval.ndim) if i not in numbers.update_window_dims]
        batches = numbers.scatter_indices_batching_dims
        places = [axis for i, axis in enumerate(places) if i not in batches]
        return [numbers.scatter_dims_to_operand_dims, (), places]
    else:
        axes = ()
    return [axes] * len(arguments)
