"""Along which axes a parameter is a matrix, as far as its name, shape and siblings tell.

With two axes, the last one is the output: `kernel (in, out)`. Whatever is called `weight` is in
torch's layout, `(out, in)`. A bias `(n,)` that fits one end only tells which end is the output.

With more axes, several readings may fit: `query/kernel (12, 64, 64)` has 64 heads of dimension 64
for 12 features, or it is 12 layers of `64 × 64`. The evidence, in this order:

- the other factor of LoRA: `lora_a (..., r)` and `lora_b (r, ...)`;
- the bias: `(H, K)` beside a query `(D, H, K)`, or `(L, n)` beside a stack of layers;
- the siblings: `query (D, H, K)` and `out (H, K, D)` have the same heads, `up (E, D, F)` and
  `down (E, F, D)` the same experts, as many as a router has outputs;
- the sizes: `D = H·K`, and kernels of convolutions as high as wide.

If one reading is left, and it is not a stack, it decides: users say which layers they stack.
Otherwise `axes_of` returns the readings, for the error that asks which of them is right.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from ._evidence import has_experts
from ._form import MatrixAxes
from ._names import (
    Place,
    Shapes,
    bias_of,
    is_convolution,
    is_named_matrix,
    is_output_first,
    layer_place,
)


class Reading(NamedTuple):
    """Axes that fit a parameter, and their meaning."""

    axes: MatrixAxes
    meaning: str
    ambiguous: bool = False


Readings = tuple[Reading, ...]


def axes_of(name: str, shapes: Shapes, *, head_wise: bool = False) -> MatrixAxes | Readings:
    """The axes of a parameter with at least two axes, or the readings among which a user chooses.

    Args:
      name: its path.
      shapes: of all parameters, by path.
      head_wise: whether each head of a query or key is a matrix of its own.
    """
    if len(shapes[name]) == 2:
        inputs, outputs = ends_of(name, shapes)
        return MatrixAxes(rows=inputs, columns=outputs)
    readings = _lora_factors(name, shapes) or _attention(name, shapes) or _convolution(name, shapes)
    readings = readings or _others(name, shapes)
    reading, *others = readings
    if others or reading.ambiguous:
        return readings
    if head_wise and _role(layer_place(name)) in ("query", "key"):
        return MatrixAxes(rows=0, columns=2)
    return reading.axes


def ends_of(name: str, shapes: Shapes) -> tuple[int, int]:
    """The axis of the inputs and that of the outputs, of a parameter with two axes."""
    output = 0 if is_output_first(name) else 1
    fits = [size == _width(bias_of(name, shapes)) for size in shapes[name]]
    if any(fits) and not all(fits):
        output = fits.index(True)
    return 1 - output, output


def _width(bias: tuple[int, ...] | None, ndim: int = 2) -> int | None:
    """The size of a bias that is a vector; Equinox's of a convolution is `(out, 1, 1)`."""
    if bias is None or len(bias) not in (1, ndim - 1) or any(size > 1 for size in bias[1:]):
        return None
    return bias[0]


# Attention

_SPELLED = {
    "query": ("query", "q", "wq", "q_proj", "query_proj"),
    "key": ("key", "k", "wk", "k_proj", "key_proj"),
    "value": ("value", "v", "wv", "v_proj", "value_proj"),
    "out": ("out", "o", "wo", "o_proj", "out_proj", "output"),
}
_ROLES = {name: role for role, names in _SPELLED.items() for name in names}
_AROUND_ROLE = re.compile(r"((self|cross)_)?att(entio)?n_|_att(entio)?n|_proj(ection)?|_dense")
_OF_MLP = re.compile(r"wi(_[01])?|w_?(in|up|gate|1|3)|(up|gate)(_proj)?")


def _role(place: Place) -> str | None:
    """The part of attention that a layer is: `attn_out_proj` is "out"."""
    if place.within not in ("", "/kernel", "/w"):
        return None
    return _ROLES.get(place.layer) or _ROLES.get(_AROUND_ROLE.sub("", place.layer))


def _attention(name: str, shapes: Shapes) -> Readings:
    """The readings of `(D, H, K)`, or of an `out (H, K, D)`; none if it is not of attention."""
    role, shape = _role(layer_place(name)), shapes[name]
    if role is None or len(shape) not in (3, 4) or _is_of_mlp(name, shapes):
        return ()
    if len(shape) == 4 and bias_of(name, shapes) == shape[-1:]:
        return ()  # layers would be an axis of the bias too
    out = role == "out"
    if len(shape) == 4:
        first, second = ((1, 2), (0, 2)) if out else (1, 0)
        columns = 3 if out else (2, 3)
        return (
            Reading(MatrixAxes(first, columns), f"axis 0 is {shape[0]} layers", ambiguous=True),
            Reading(MatrixAxes(second, columns), f"axis 1 is {shape[1]} layers", ambiguous=True),
        )
    heads, dim = shape[:2] if out else shape[1:]
    both = (
        Reading(MatrixAxes((0, 1), 2) if out else MatrixAxes(0, (1, 2)), f"{heads} heads of {dim}"),
        _as_stack(shape, MatrixAxes(1, 2)),
    )
    for evidence in (_by_bias, _by_siblings, _by_size):
        fits = evidence(name, shapes)
        if sum(fits) == 1:
            return both[:1] if fits[0] else both[1:]
    if all(_by_siblings(name, shapes)):
        return both
    more = (r for r in _of_three(shape) if r.axes not in [r.axes for r in both])
    return _left((*both, *more), name, shapes)


Fits = tuple[bool, bool]
"""Whether a kernel of three axes fits one layer of attention, and whether it fits a stack."""


def _by_bias(name: str, shapes: Shapes) -> Fits:
    a, b, c = shapes[name]
    bias = bias_of(name, shapes)
    of_heads = (c,) if _role(layer_place(name)) == "out" else (b, c)
    return bias in (None, of_heads), bias in (None, (a, c))


def _by_siblings(name: str, shapes: Shapes) -> Fits:
    own = shapes[name]
    role = _role(layer_place(name))
    query = own if role == "query" else _sibling(name, "query", shapes)
    out = own if role == "out" else _sibling(name, "out", shapes)
    query = own if query is None and role != "out" else query
    if query is None or out is None or len(query) != 3:
        return False, False
    heads = out[:2] == query[1:] if len(out) == 3 else out[:1] == (query[1] * query[2],)
    layers = len(out) == 3 and out[:2] == (query[0], query[2])
    if role in ("key", "value"):  # grouped queries have fewer of their heads
        heads &= query[1] % own[1] == 0 and own[2] == query[2]
        layers &= own[0] == query[0]
    return heads, layers


def _by_size(name: str, shapes: Shapes) -> Fits:
    """`D = H·K` is not a coincidence: a stack has fewer layers than a layer has elements."""
    if _role(layer_place(name)) == "out":
        heads, dim, features = shapes[name]
    else:
        query = _sibling(name, "query", shapes) or ()
        features, heads, dim = query if len(query) == 3 else shapes[name]
    return features == heads * dim, False


def _sibling(name: str, role: str, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of another part of the same attention; None if there is none, or a choice."""
    beside = map(layer_place(name).beside, _SPELLED[role])
    named = next((shapes[path] for path in beside if path in shapes), None)
    if named is not None:
        return named
    found = {x for other, x in _beside(name, shapes) if _role(layer_place(other)) == role}
    return found.pop() if len(found) == 1 else None


def _is_of_mlp(name: str, shapes: Shapes) -> bool:
    """Whether it is `wo` beside `wi`, and not beside queries."""
    place = layer_place(name)
    if _role(place) != "out" or _sibling(name, "query", shapes) is not None:
        return False
    beside = (layer_place(other).layer for other, _ in _beside(name, shapes))
    return any(map(_OF_MLP.fullmatch, beside))


def _beside(name: str, shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """The same parameters of the other layers of the module."""
    own = layer_place(name)
    places = ((other, layer_place(other)) for other in shapes if other != name)
    same = (other for other, at in places if (at.scope, at.within) == (own.scope, own.within))
    return [(other, shapes[other]) for other in same]


# Convolutions


def _convolution(name: str, shapes: Shapes) -> Readings:
    """The readings of a kernel of a convolution; none if it is not one."""
    shape, bias = shapes[name], bias_of(name, shapes)
    ndim = len(shape)
    output_first = is_output_first(name)
    of_equinox = output_first and bias == (shape[0],) + (1,) * (ndim - 2) != shape[:-1]
    if not (is_named_matrix(name) and (is_convolution(name, ndim) or of_equinox)):
        return ()
    named, other = (_kernel_of(ndim, first) for first in (output_first, not output_first))
    axes = (tuple(range(2, ndim)), 1) if output_first else (tuple(range(1, ndim - 1)), ndim - 1)
    layers = _as_stack(shape, MatrixAxes(*axes))
    if bias is not None:
        width = _width(bias, ndim)
        if width is None:
            return (layers,)
        ends = (shape[0], shape[-1]) if output_first else (shape[-1], shape[0])
        return (other,) if width == ends[1] != ends[0] else (named,)
    if ndim == 3 or (ndim == 4 and _is_square(shape, named)):
        return (named,)
    return (named, other, layers) if ndim == 4 and _is_square(shape, other) else (named, layers)


def _kernel_of(ndim: int, output_first: bool) -> Reading:
    if output_first:
        return Reading(MatrixAxes(tuple(range(1, ndim)), 0), "a convolution, output axis first")
    return Reading(MatrixAxes(tuple(range(ndim - 1)), ndim - 1), "a convolution, output axis last")


def _is_square(shape: tuple[int, ...], reading: Reading) -> bool:
    """Whether the kernel is as high as wide under this reading."""
    height, width = shape[2:] if reading.axes.columns == 0 else shape[:2]
    return height == width


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

    def reading(layers: int) -> Reading:
        fused = layers + 1 + (not first and _parts_of(place, own[layers + 1 :]))
        ends = range(layers, ndim - 1) if first else range(fused, ndim)
        merged = ends[0] if len(ends) == 1 else tuple(ends)
        axes = MatrixAxes(merged, ndim - 1) if first else MatrixAxes(layers, merged)
        return Reading(axes, "a factor of LoRA", ambiguous=layers > 0)

    most = min(len(a), len(b)) - 1
    return tuple(reading(k) for k in range(most) if a[:k] == b[:k] and a[-1] == b[k])


def _parts_of(place: Place, outputs: tuple[int, ...]) -> bool:
    """Whether the outputs begin with an axis of queries, keys and values, or keys and values."""
    fused = re.search(r"(?<![a-z])(q?kv)(?![a-z])", place.scope.rstrip("/").rpartition("/")[2])
    return fused is not None and len(outputs) > 1 and outputs[0] == len(fused[1])


# Stacks of layers or experts, and merged axes


def _others(name: str, shapes: Shapes) -> Readings:
    """The readings of any other parameter; a bias is evidence, but not certain.

    With four axes or more, and a bias that is a vector of outputs, all other axes are inputs.
    """
    shape, bias = shapes[name], bias_of(name, shapes)
    ndim, swap = len(shape), is_output_first(name)
    convolution = _kernel_of(ndim, swap)
    if ndim > 3 and is_named_matrix(name) and bias == (shape[0 if swap else -1],):
        return (convolution,)
    einsum = "einsum" in layer_place(name).layer
    if ndim == 3:
        readings = _of_three(shape, swap)
        if einsum:
            first = Reading(MatrixAxes(1, (0, 2)), f"{shape[0]} heads of {shape[2]}", True)
            readings = (first, *readings)
    elif ndim == 4:
        readings = (_as_stack(shape, _ordered(2, 3, swap)), convolution, *_of_four(shape, swap))
        if _is_square(shape, convolution):
            readings = (convolution, readings[0])
        if einsum:
            first = Reading(MatrixAxes(2, (1, 3)), f"{shape[1]} heads of {shape[3]}", True)
            readings = (first, *readings)
    else:
        readings = (_as_stack(shape, _ordered(ndim - 2, ndim - 1, swap)),)
    return _left(readings, name, shapes)


Ends = int | tuple[int, ...]


def _ordered(inputs: Ends, outputs: Ends, swap: bool) -> MatrixAxes:
    return MatrixAxes(outputs, inputs) if swap else MatrixAxes(inputs, outputs)


def _of_three(shape: tuple[int, ...], swap: bool = False) -> Readings:
    """All that three axes may be: a stack, or one matrix of which one end has two axes."""
    ends: list[tuple[Ends, Ends]] = [((0, 1), 2), (0, (1, 2)), (2, (0, 1)), ((1, 2), 0)]
    return (
        _as_stack(shape, _ordered(1, 2, swap)),
        _as_stack(shape, _ordered(0, 2, swap), axis=1),
        *(_one_matrix(shape, _ordered(*pair, swap)) for pair in ends),
    )


def _one_matrix(shape: tuple[int, ...], axes: MatrixAxes) -> Reading:
    sides = ((x,) if isinstance(x, int) else x for x in (axes.rows, axes.columns))
    rows, columns = (math.prod(shape[axis] for axis in side) for side in sides)
    return Reading(axes, f"one matrix {rows}×{columns}", ambiguous=True)


def _of_four(shape: tuple[int, ...], swap: bool) -> Readings:
    """One axis of layers, and one matrix of which one end has two axes."""
    ends: list[tuple[Ends, Ends]] = [(1, (2, 3)), ((1, 2), 3), (0, (2, 3)), ((0, 2), 3)]
    axes = (_ordered(*pair, swap) for pair in ends)
    return tuple(_as_stack(shape, x, axis=axis) for x, axis in zip(axes, (0, 0, 1, 1), strict=True))


def _left(readings: Readings, name: str, shapes: Shapes) -> Readings:
    """Without those that the bias, a router or the siblings exclude, unless they exclude all."""
    shape, bias = shapes[name], bias_of(name, shapes)
    swapped = _swapped(name, shapes)
    experts = has_experts(name, shapes)
    for fits in (
        lambda axes: bias is None or bias == _bias_under(axes, shape),
        lambda axes: len(swapped) != 1 or {*axes.named} in swapped,
        lambda axes: not experts or 0 not in axes.named,
    ):
        readings = tuple(r for r in readings if fits(r.axes)) or readings
    return readings


def _bias_under(axes: MatrixAxes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a bias has: its outputs, with axes of layers where the kernel has them."""
    outputs = (axes.columns,) if isinstance(axes.columns, int) else axes.columns
    bias = [shape[axis] for axis in outputs]
    for axis in range(len(shape)):
        if axis not in axes.named:
            bias.insert(axis, shape[axis])
    return tuple(bias)


def _swapped(name: str, shapes: Shapes) -> list[set[int]]:
    """The pairs of axes that a layer beside it has the other way round: `up` and `down`."""
    own = shapes[name]
    pairs = [{i, j} for j in range(len(own)) for i in range(j) if own[i] != own[j]]

    def other_way(pair: set[int]) -> tuple[int, ...]:
        i, j = pair
        return tuple(own[{i: j, j: i}.get(axis, axis)] for axis in range(len(own)))

    beside = {x for _, x in _beside(name, shapes)}
    return [pair for pair in pairs if other_way(pair) in beside]


def _as_stack(shape: tuple[int, ...], axes: MatrixAxes, axis: int = 0) -> Reading:
    batch = [size for a, size in enumerate(shape) if a not in axes.named]
    kept = [size for a, size in enumerate(shape) if a in axes.named]
    what = f"{'×'.join(map(str, batch))} layers or experts of {'×'.join(map(str, kept))}"
    return Reading(axes, f"{what}, along axis {axis}" if axis else what, ambiguous=True)
