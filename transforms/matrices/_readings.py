"""Along which axes a parameter is a matrix, as far as its name, shape and siblings tell.

With more than two axes several readings may fit, and the evidence (`docs/matrices.md`) leaves some
of them: that of the other factor of LoRA, then the bias, the siblings and the sizes. If one is
left, and it is not a stack, it decides: users say which layers they stack. Otherwise `axes_of`
returns the readings, for the error that asks which of them is right.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from ._evidence import has_experts
from ._form import MatrixAxes, as_tuple, kernel_axes
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

    With `head_wise`, each head of a query or key is a matrix of its own.
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
    out = role == "out"
    if len(shape) == 4:
        if bias_of(name, shapes) == shape[-1:]:
            return ()  # layers would be an axis of the bias too
        return tuple(
            Reading(
                MatrixAxes((1 - i, 2), 3) if out else MatrixAxes(1 - i, (2, 3)),
                f"axis {i} is {shape[i]} layers",
                ambiguous=True,
            )
            for i in (0, 1)
        )
    heads, dim = shape[:2] if out else shape[1:]
    both = (
        Reading(MatrixAxes((0, 1), 2) if out else MatrixAxes(0, (1, 2)), f"{heads} heads of {dim}"),
        _as_stack(shape, MatrixAxes(1, 2)),
    )
    of_bias = [_fits_bias(reading.axes, name, shapes) for reading in both]
    of_siblings = _by_siblings(name, shapes)
    for fits in (of_bias, of_siblings, (_is_by_size(name, shapes), False)):
        if sum(fits) == 1:
            return both[:1] if fits[0] else both[1:]
    if all(of_siblings):
        return both
    more = (r for r in _of_three(shape) if r.axes not in [r.axes for r in both])
    return _left((*both, *more), name, shapes)


def _by_siblings(name: str, shapes: Shapes) -> tuple[bool, bool]:
    """Whether a kernel of three axes fits one layer of attention, and whether it fits a stack."""
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


def _is_by_size(name: str, shapes: Shapes) -> bool:
    """`D = H·K` is not a coincidence: a stack has fewer layers than a layer has elements."""
    if _role(layer_place(name)) == "out":
        heads, dim, features = shapes[name]
    else:
        query = _sibling(name, "query", shapes) or ()
        features, heads, dim = query if len(query) == 3 else shapes[name]
    return features == heads * dim


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
    axis = "first" if output_first else "last"
    axes = kernel_axes(ndim, output_first=output_first)
    return Reading(axes, f"a convolution, output axis {axis}")


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
    stack = _as_stack(shape, _ordered(ndim - 2, ndim - 1, swap))
    if ndim == 3:
        readings = _of_three(shape, swap)
    elif ndim == 4 and _is_square(shape, convolution):
        readings = (convolution, stack)
    else:
        readings = (stack, convolution, *_of_four(shape, swap)) if ndim == 4 else (stack,)
    if "einsum" in layer_place(name).layer and ndim < 5:
        heads = MatrixAxes(ndim - 2, (ndim - 3, ndim - 1))
        readings = (Reading(heads, f"{shape[-3]} heads of {shape[-1]}", True), *readings)
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
    sides = map(as_tuple, (axes.rows, axes.columns))
    rows, columns = (math.prod(shape[axis] for axis in side) for side in sides)
    return Reading(axes, f"one matrix {rows}×{columns}", ambiguous=True)


def _of_four(shape: tuple[int, ...], swap: bool) -> Readings:
    """One axis of layers, 0 or 1, and one matrix of which one end has two axes."""
    ends: list[tuple[Ends, Ends]] = [(1, (2, 3)), ((1, 2), 3), (0, (2, 3)), ((0, 2), 3)]
    return tuple(_as_stack(shape, _ordered(*x, swap), i // 2) for i, x in enumerate(ends))


def _left(readings: Readings, name: str, shapes: Shapes) -> Readings:
    """Without those that the bias, a router or the siblings exclude, unless they exclude all."""
    swapped = _swapped(name, shapes)
    experts = has_experts(name, shapes)
    for fits in (
        lambda axes: _fits_bias(axes, name, shapes),
        lambda axes: len(swapped) != 1 or {*axes.named} in swapped,
        lambda axes: not experts or 0 not in axes.named,
    ):
        readings = tuple(r for r in readings if fits(r.axes)) or readings
    return readings


def _fits_bias(axes: MatrixAxes, name: str, shapes: Shapes) -> bool:
    """Whether a bias has the outputs, with axes of layers where the kernel has them."""
    shape = shapes[name]
    expected = [shape[axis] for axis in as_tuple(axes.columns)]
    for axis in range(len(shape)):
        if axis not in axes.named:
            expected.insert(axis, shape[axis])
    return bias_of(name, shapes) in (None, tuple(expected))


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
