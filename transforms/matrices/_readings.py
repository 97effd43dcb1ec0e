"""Along which axes a parameter is a matrix, as far as its name, shape and siblings tell.

With more than two axes several readings may fit, and the evidence (`docs/matrices.md`) leaves some
of them: that of the other factor of LoRA, then the bias, the siblings and the sizes. If one is
left, and it is not a stack, it decides: users say which layers they stack. Otherwise `axes_of`
returns the readings, for the error that asks which of them is right.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

from ._evidence import (
    OF_MLP,
    Parameters,
    axis_of_experts,
    fits_bias,
    inputs_by_bias,
    inputs_of_experts,
    layer_axes,
    width_of,
)
from ._form import (
    MatrixAxes,
    Reading,
    Readings,
    as_tuple,
    behind,
    kernel_axes,
    merged,
    reading,
)
from ._names import (
    Place,
    Shapes,
    bias_of,
    is_convolution,
    is_local,
    is_named_matrix,
    is_output_first,
    is_transposed,
    layer_place,
)


def axes_of(name: str, shapes: Parameters) -> MatrixAxes | Readings:
    """The axes of a parameter with two axes or more, or the readings among which a user chooses."""
    if len(shapes[name]) == 2:
        inputs, outputs = ends_of(name, shapes)
        return MatrixAxes(rows=inputs, columns=outputs)
    readings = _lora_factors(name, shapes) or _attention(name, shapes) or _convolution(name, shapes)
    readings = readings or _others(name, shapes)
    first, *others = readings
    return readings if others or first.ambiguous else first.axes


def per_head(name: str, axes: MatrixAxes) -> MatrixAxes:
    """The axes of which each head of a query or key is a matrix of its own."""
    place, columns = layer_place(name), as_tuple(axes.columns)
    if len(columns) == 2 and (_role(place) in ("query", "key") or place.layer == "q_einsum"):
        return dataclasses.replace(axes, columns=columns[1])
    return axes


def ends_of(name: str, shapes: Shapes) -> tuple[int, int]:
    """The axis of the inputs and that of the outputs, of a parameter with two axes."""
    output = 0 if is_output_first(name) else 1
    fits = [size == width_of(bias_of(name, shapes)) for size in shapes[name]]
    output = fits.index(True) if any(fits) and not all(fits) else output
    return 1 - output, output


HEADS = MatrixAxes(0, (1, 2))  # (features, heads, head_dim)
FROM_HEADS = MatrixAxes((0, 1), 2)  # (heads, head_dim, features)
HEADS_FIRST = MatrixAxes(-2, (-3, -1))  # (..., heads, features, head_dim)

# Attention

_SPELLED = {
    "query": ("query", "q", "wq", "w_q", "q_proj", "query_proj"),
    "key": ("key", "k", "wk", "w_k", "k_proj", "key_proj"),
    "value": ("value", "v", "wv", "w_v", "v_proj", "value_proj"),
    "out": ("out", "o", "wo", "w_o", "o_proj", "out_proj", "output"),
}
_ROLES = {name: role for role, names in _SPELLED.items() for name in names}
_AROUND_ROLE = re.compile(
    r"((self|cross)_)?att(entio)?n_|_att(entio)?n|_proj(ection)?|_dense|_w(?![a-z])"
)


def _role(place: Place) -> str | None:
    """The part of attention that a layer is: `attn_out_proj` is "out"."""
    if place.within not in ("", "/kernel", "/w"):
        return None
    layer = place.layer.lower()  # TransformerLens' `W_Q`
    return _ROLES.get(layer) or _ROLES.get(_AROUND_ROLE.sub("", layer))


def _attention(name: str, shapes: Shapes) -> Readings:
    """The readings of `(D, H, K)`, or of an `out (H, K, D)`; none if it is not of attention."""
    role, shape = _role(layer_place(name)), shapes[name]
    if role is None or len(shape) not in (3, 4) or _is_of_mlp(name, shapes):
        return ()
    out, bias = role == "out", bias_of(name, shapes)
    usual = FROM_HEADS if out else HEADS
    if len(shape) == 4:
        if bias is not None and len(bias) == 1 and bias[0] in shape:
            return ()  # layers would be an axis of the bias too
        return tuple(with_layers(shape, behind(usual, 4, i), i) for i in (0, 1))
    heads, dim = shape[:2] if out else shape[1:]
    last, first, layers = _by_siblings(name, shapes)
    of_siblings = {
        Reading(usual, f"{heads} heads of {dim}"): last or (out and first),
        reading(shape, MatrixAxes(1, 2)): layers,
    }
    both = tuple(of_siblings)
    if first and not out:
        of_siblings[_heads_first(shape)] = True
    left = _narrowed(
        tuple(of_siblings), lambda r: fits_bias(r.axes, name, shapes), lambda r: of_siblings[r]
    )
    if _is_by_size(name, shapes) and both[0] in left:
        left = both[:1]
    if len(left) == 1 or any(of_siblings.values()):
        return left
    more = (reading(shape, MatrixAxes(*ends)) for ends in _MERGED[3])
    more = (r for r in more if r.axes not in [r.axes for r in both])
    return _left((*both, *more), name, shapes)


def with_layers(shape: tuple[int, ...], axes: MatrixAxes, place: int) -> Reading:
    """The reading with layers on an axis, -1 or counted from 0."""
    where = "the last axis" if place == -1 else f"axis {place}"
    return Reading(axes, f"{where} is {shape[place]} layers", ambiguous=True)


def _narrowed(readings: Readings, *tests: Callable[[Reading], bool]) -> Readings:
    """The readings that pass each test, unless none does."""
    for test in tests:
        readings = tuple(filter(test, readings)) or readings
    return readings


def _heads_first(shape: tuple[int, ...]) -> Reading:
    return Reading(behind(HEADS_FIRST, len(shape), None), f"{shape[-3]} heads of {shape[-1]}")


def _by_siblings(name: str, shapes: Shapes) -> tuple[bool, bool, bool]:
    """Whether three axes fit one layer, with heads after features or first, or a stack.

    Keys and values have the same heads as queries or fewer, and as a rule the same features.
    """
    own, role = shapes[name], _role(layer_place(name))
    paths = [name if role == x else _sibling(name, x, shapes) for x in _SPELLED]
    query, *keys, out = (None if path is None else shapes[path] for path in paths)
    query = own if query is None and role != "out" else query
    if query is None or out is None or len(query) != 3:
        return False, False, False
    last = out[:2] == query[1:] if len(out) == 3 else out[:1] == (query[1] * query[2],)
    first = out == (query[0], query[2], query[1])
    layers = len(out) == 3 and out[:2] == (query[0], query[2])
    layers &= len(bias_of(paths[-1] or name, shapes) or out) > 1 and math.prod(out[:-1]) != out[-1]
    for beside in (x for x in keys if x is not None and len(x) == 3):
        first &= query[0] % beside[0] == 0 and beside[1:] == query[1:]
        last &= query[1] % beside[1] == 0 and beside[2] == query[2]
        last &= not first or beside[0] == query[0]
        layers &= beside[0] == query[0]
    return last, first, layers


def heads_come_first(name: str, shapes: Shapes) -> bool | None:
    """Whether a query, key or value is `(heads, features, head_dim)`, as the siblings have it.

    None if `(features, heads, head_dim)` fits too, as with as many features as heads.
    """
    if len(shapes[name]) != 3 or _role(layer_place(name)) == "out":
        return False
    last, first, _ = _by_siblings(name, shapes)
    return None if first and last else first


def _is_by_size(name: str, shapes: Shapes) -> bool:
    """`D = H·K` is not a coincidence: a stack has fewer layers than a layer has elements."""
    if _role(layer_place(name)) == "out":
        heads, dim, features = shapes[name]
    else:
        query = _sibling(name, "query", shapes)
        own = shapes[query or name]
        features, heads, dim = own if len(own) == 3 else shapes[name]
    return features == heads * dim


def _sibling(name: str, role: str, shapes: Shapes) -> str | None:
    """Another part of the same attention; None if there is none, or a choice of shapes."""
    beside = map(layer_place(name).beside, _SPELLED[role])
    named = next((path for path in beside if path in shapes), None)
    if named is not None:
        return named
    found = {x: other for other, x in _beside(name, shapes) if _role(layer_place(other)) == role}
    return next(iter(found.values())) if len(found) == 1 else None


def _is_of_mlp(name: str, shapes: Shapes) -> bool:
    """Whether it is `wo` beside `wi`, and not beside queries."""
    place = layer_place(name)
    if _role(place) != "out" or _sibling(name, "query", shapes) is not None:
        return False
    beside = (layer_place(other).layer for other, _ in _beside(name, shapes))
    return any(map(OF_MLP.fullmatch, beside))


def _beside(name: str, shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """The same parameters of the other layers of the module."""
    own = layer_place(name)
    places = ((other, layer_place(other)) for other in shapes if other != name)
    same = (other for other, at in places if (at.scope, at.within) == (own.scope, own.within))
    return [(other, shapes[other]) for other in same]


# Convolutions


def _convolution(name: str, shapes: Shapes) -> Readings:
    """The readings of a kernel of a convolution; none if it is not one.

    A bias that fits one axis only says which has the outputs, also beside the inputs, as in a
    transposed convolution, whose name alone does not tell.
    """
    shape, bias = shapes[name], bias_of(name, shapes)
    ndim, width = len(shape), width_of(bias, len(shape))
    output_first = is_output_first(name)
    of_equinox = output_first and bias == (shape[0],) + (1,) * (ndim - 2) != shape[:-1]
    of_bias = ndim > 3 and bias is not None and len(bias) == 1 and width in shape
    is_conv = of_equinox or of_bias or is_convolution(name, ndim)
    if not (is_named_matrix(name, shapes) and is_conv):
        return ()
    ends = (0, 1, ndim - 1, ndim - 2) if output_first else (ndim - 1, ndim - 2, 0, 1)
    named, swapped, other, _ = kernels = tuple(_kernel_of(shape, end) for end in ends)
    layers = [
        reading(shape, kernel_axes(ndim, output=n if output_first else -1, layers=n))
        for n in range(1, ndim - 2)
    ]
    if is_local(name):
        layers = [reading(shape, _ordered(ndim - 2, ndim - 1, output_first))]
    elif width in shape:
        fits = [end for end in range(ndim) if shape[end] == width]
        if ends[0] in fits and not (is_transposed(name) and ends[1] in fits):
            return (named,)
        if len(fits) == 1:
            return (_kernel_of(shape, fits[0]),)
        readings = tuple(r for end, r in zip(ends, kernels, strict=True) if end in fits)
        return _narrowed(readings, lambda r: _is_square(shape, r)) or (named,)
    elif width is not None:
        return (named,)
    elif is_transposed(name) and bias is None:
        return (named, swapped, *layers[:1])
    if bias is not None or is_local(name):
        fitting = tuple(r for r in layers if fits_bias(r.axes, name, shapes))
        return fitting or _by_bias(name, shapes) or (named, *layers[:1])
    if ndim == 3 or (ndim == 4 and _is_square(shape, named)):
        return (named,)
    return (named, other, *layers) if ndim == 4 and _is_square(shape, other) else (named, *layers)


def _kernel_of(shape: tuple[int, ...], output: int) -> Reading:
    place = {0: "first", len(shape) - 1: "last"}.get(output, str(output))
    return Reading(kernel_axes(len(shape), output=output), f"a convolution, output axis {place}")


def _is_square(shape: tuple[int, ...], reading: Reading) -> bool:
    """Whether the kernel is as high as wide under this reading."""
    space = shape[2:] if reading.axes.columns in (0, 1) else shape[:-2]
    return len({*space}) == 1


def _by_bias(name: str, shapes: Shapes) -> Readings:
    """The readings whose inputs are the axes that a bias lacks.

    The others are outputs, or all but the last of them are of layers.
    """
    sides = (
        (inputs, tuple(axis for axis in range(len(shapes[name])) if axis not in inputs))
        for inputs in inputs_by_bias(name, shapes)
    )
    return tuple(
        reading(shapes[name], MatrixAxes(merged(inputs), merged(others[k:])))
        for inputs, others in sides
        for k in reversed(range(len(others)))
    )


# Factors of LoRA

_FACTOR = re.compile(r"(.*lora_?)([abAB])")
_OTHER = dict(zip("abAB", "baBA", strict=True))


def _lora_factors(name: str, shapes: Shapes) -> Readings:
    """The readings of `lora_a (..., r)` beside `lora_b (r, ...)`, in both behind stacked layers."""
    place = layer_place(name)
    factor = _FACTOR.fullmatch(place.layer)
    other = factor and shapes.get(place.beside(factor[1] + _OTHER[factor[2]]))
    if not (factor and other):
        return ()
    own, ndim = shapes[name], len(shapes[name])
    first = factor[2] in "aA"
    a, b = (own, other) if first else (other, own)

    def factor_behind(layers: int) -> Reading:
        fused = layers + 1 + (not first and _parts_of(place, own[layers + 1 :]))
        ends = range(layers, ndim - 1) if first else range(fused, ndim)
        side = merged(tuple(ends))
        axes = MatrixAxes(side, ndim - 1) if first else MatrixAxes(layers, side)
        return Reading(axes, "a factor of LoRA", ambiguous=layers > 0)

    most = min(len(a), len(b)) - 1
    return tuple(factor_behind(k) for k in range(most) if a[:k] == b[:k] and a[-1] == b[k])


def _parts_of(place: Place, outputs: tuple[int, ...]) -> bool:
    """Whether the outputs begin with an axis of queries, keys and values, or keys and values."""
    fused = re.search(r"(?<![a-z])(q?kv)(?![a-z])", place.scope.rstrip("/").rpartition("/")[2])
    return fused is not None and len(outputs) > 1 and outputs[0] == len(fused[1])


# Stacks of layers or experts, and merged axes


def _others(name: str, shapes: Parameters) -> Readings:
    """The readings of any other parameter, also of S5's `B (out, in, 2)`; a bias is evidence."""
    shape, inputs = shapes[name], inputs_of_experts(name, shapes)
    ndim, swap = len(shape), is_output_first(name) if inputs is None else inputs == -1
    convolution = _kernel_of(shape, 0 if swap else ndim - 1)
    pairs = ((ndim - 2, ndim - 1), *_MERGED.get(ndim, ()))
    readings = tuple(reading(shape, _ordered(rows, columns, swap)) for rows, columns in pairs)
    if ndim == 4:
        stack, *more = readings
        is_square = _is_square(shape, convolution)
        readings = (convolution, stack) if is_square else (stack, convolution, *more)
    swaps = (not swap, swap) if shape[-1] == 2 else (swap,) * (-1 in layer_axes(name, shapes))
    readings += tuple(reading(shape, _ordered(ndim - 3, ndim - 2, x)) for x in swaps)
    of_einsum = _einsum(name, shapes)
    others = tuple(r for r in readings if r.axes not in [x.axes for x in of_einsum])
    return _left((*of_einsum, *others), name, shapes, of_einsum)


def _einsum(name: str, shapes: Shapes) -> Readings:
    """The readings that Gemma's layers have beside those of all others."""
    shape, layer = shapes[name], layer_place(name).layer
    ndim = len(shape)
    if "einsum" not in layer:
        return ()
    if layer.startswith("gat"):
        # The other layer has the features and outputs the other way round.
        transposed = shape[-2] != shape[-1] and shape[-2:] in dict(_beside(name, shapes)).values()
        both = (reading(shape, _ordered(ndim - 2, ndim - 1, swap)) for swap in (False, True))
        return tuple(both)[:: -1 if transposed else 1]
    if "vec" in layer:
        axes = MatrixAxes((ndim - 3, ndim - 2), ndim - 1)
        return (Reading(axes, f"{shape[-3]} heads of {shape[-2]}", ambiguous=True),)
    return (_heads_first(shape)._replace(ambiguous=True),)


Ends = int | tuple[int, ...]


def _ordered(inputs: Ends, outputs: Ends, swap: bool) -> MatrixAxes:
    return MatrixAxes(outputs, inputs) if swap else MatrixAxes(inputs, outputs)


_MERGED: dict[int, tuple[tuple[Ends, Ends], ...]] = {
    3: ((0, 2), ((0, 1), 2), (0, (1, 2)), (2, (0, 1)), ((1, 2), 0)),
    4: ((1, (2, 3)), ((1, 2), 3), (0, (2, 3)), ((0, 2), 3)),
}
"""By the number of axes: layers on axis 1, and one end of a matrix that has two axes."""


def _left(readings: Readings, name: str, shapes: Shapes, kept: Readings = ()) -> Readings:
    """Without those that the bias, a router or the siblings exclude, unless they exclude all.

    The siblings do not exclude those `kept`.
    """
    swapped, experts = _swapped(name, shapes), axis_of_experts(name, shapes)
    loose = experts == 1 and len(shapes[name]) == 3 and _role(layer_place(name)) is None
    if loose:
        readings = tuple(r for r in readings if 1 not in r.axes.named)
    fitting = tuple(r for r in readings if fits_bias(r.axes, name, shapes, loose=loose))
    if all(r.ambiguous and 0 in r.axes.named for r in fitting):  # none is a stack on axis 0
        own = [r.axes for r in fitting]
        fitting += tuple(r for r in _by_bias(name, shapes) if r.axes not in own)
    return _narrowed(
        fitting or readings,
        lambda r: len(swapped) != 1 or {*r.axes.named} in swapped or r in kept,
        lambda r: experts != 0 or 0 not in r.axes.named,
    )


def _swapped(name: str, shapes: Shapes) -> list[set[int]]:
    """The pairs of axes that a layer beside it has the other way round: `up` and `down`."""
    own, axes = shapes[name], range(len(shapes[name]))
    turned = {
        (i, j): tuple(own[{i: j, j: i}.get(axis, axis)] for axis in axes)
        for i, j in itertools.combinations(axes, 2)
    }
    beside = {x for _, x in _beside(name, shapes)}
    return [{*pair} for pair, x in turned.items() if x != own and x in beside]
