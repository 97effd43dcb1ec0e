"""Along which axes a parameter is a matrix, as far as its name, shape and siblings tell.

With two axes, the last one is the output: `kernel (in, out)`. Whatever is called `weight` is in
torch's layout, `(out, in)`. A bias `(n,)` that fits one end only tells which end is the output.

With more axes, several readings may fit: `query/kernel (12, 64, 64)` has 64 heads of dimension 64
for 12 features, or it is 12 layers of `64 × 64`. The evidence, in this order:

- the bias: `(H, K)` beside a query `(D, H, K)`, or `(L, n)` beside a stack of layers;
- the siblings: `query (D, H, K)` and `out (H, K, D)` have the same heads;
- the sizes: `D = H·K`, and kernels of convolutions as high as wide.

What is left decides, if it is one reading, and not a stack: whoever stacks layers says so. Else
`axes_of` returns the readings, for the error that asks which of them is right.
"""

from __future__ import annotations

from typing import NamedTuple

from ._form import MatrixAxes
from ._names import (
    Place,
    Shapes,
    bias_of,
    is_convolution,
    is_named_matrix,
    is_output_first,
    place_of,
)


class Reading(NamedTuple):
    """Axes that fit a parameter, and what it is then."""

    axes: MatrixAxes
    meaning: str
    must_be_said: bool = False


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
    readings = _attention(name, shapes) or _convolution(name, shapes)
    readings = readings or _stacks(name, shapes)
    reading, *others = readings
    if others or reading.must_be_said:
        return readings
    if head_wise and _role(place_of(name)) in ("query", "key"):
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

_NAMES = {
    "query": ("query", "q", "wq", "q_proj", "query_proj"),
    "key": ("key", "k", "wk", "k_proj", "key_proj"),
    "value": ("value", "v", "wv", "v_proj", "value_proj"),
    "out": ("out", "o", "wo", "o_proj", "out_proj", "output"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}


def _role(place: Place) -> str | None:
    known = place.within in ("", "/kernel", "/w")
    return _ROLES.get(place.layer) if known else None


def _attention(name: str, shapes: Shapes) -> Readings:
    """The readings of `(D, H, K)`, or of an `out (H, K, D)`; none if it is not of attention."""
    role, shape = _role(place_of(name)), shapes[name]
    if role is None or len(shape) not in (3, 4):
        return ()
    out = role == "out"
    if len(shape) == 4:
        first, second = ((1, 2), (0, 2)) if out else (1, 0)
        columns = 3 if out else (2, 3)
        return (
            Reading(MatrixAxes(first, columns), f"axis 0 is {shape[0]} layers", must_be_said=True),
            Reading(MatrixAxes(second, columns), f"axis 1 is {shape[1]} layers", must_be_said=True),
        )
    heads, dim = shape[:2] if out else shape[1:]
    both = (
        Reading(MatrixAxes((0, 1), 2) if out else MatrixAxes(0, (1, 2)), f"{heads} heads of {dim}"),
        _stack_of(shape, MatrixAxes(1, 2)),
    )
    for evidence in (_by_bias, _by_siblings, _by_size):
        fits = evidence(name, shapes)
        if sum(fits) == 1:
            return both[:1] if fits[0] else both[1:]
    return both


Fits = tuple[bool, bool]
"""Whether a kernel of three axes fits one layer of attention, and whether it fits a stack."""


def _by_bias(name: str, shapes: Shapes) -> Fits:
    a, b, c = shapes[name]
    bias = bias_of(name, shapes)
    of_heads = (c,) if _role(place_of(name)) == "out" else (b, c)
    return bias in (None, of_heads), bias in (None, (a, c))


def _by_siblings(name: str, shapes: Shapes) -> Fits:
    own = shapes[name]
    role = _role(place_of(name))
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
    if _role(place_of(name)) == "out":
        heads, dim, features = shapes[name]
    else:
        query = _sibling(name, "query", shapes) or ()
        features, heads, dim = query if len(query) == 3 else shapes[name]
    return features == heads * dim, False


def _sibling(name: str, role: str, shapes: Shapes) -> tuple[int, ...] | None:
    beside = map(place_of(name).beside, _NAMES[role])
    return next((shapes[path] for path in beside if path in shapes), None)


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
    layers = _stack_of(shape, MatrixAxes(*axes))
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


# Stacks of layers or experts


def _stacks(name: str, shapes: Shapes) -> Readings:
    """What any other parameter may be; a bias tells, but is not taken for certain."""
    shape = shapes[name]
    ndim = len(shape)
    swap = is_output_first(name)

    def matrix(rows: int, columns: int) -> MatrixAxes:
        return MatrixAxes(columns, rows) if swap else MatrixAxes(rows, columns)

    stack = _stack_of(shape, matrix(ndim - 2, ndim - 1))
    bias = bias_of(name, shapes)
    if bias is None:
        along_axis_1 = [_stack_of(shape, matrix(0, 2), axis=1)] if ndim == 3 else []
        convolution = [_kernel_of(ndim, swap)] if ndim == 4 else []
        return (stack, *along_axis_1, *convolution)
    inputs = ndim - len(bias)
    if swap or inputs in (0, ndim) or bias != shape[inputs:]:
        return (stack,)
    rows, columns = tuple(range(inputs)), tuple(range(inputs, ndim))
    merged = [axes[0] if len(axes) == 1 else axes for axes in (rows, columns)]
    one = Reading(MatrixAxes(merged[0], merged[1]), "one matrix", must_be_said=True)
    return (one, stack) if len(bias) == 1 or bias[0] == shape[0] else (one,)


def _stack_of(shape: tuple[int, ...], axes: MatrixAxes, axis: int = 0) -> Reading:
    batch = [size for a, size in enumerate(shape) if a not in axes.named]
    kept = [size for a, size in enumerate(shape) if a in axes.named]
    what = f"{'×'.join(map(str, batch))} layers or experts of {'×'.join(map(str, kept))}"
    return Reading(axes, f"{what}, along axis {axis}" if axis else what, must_be_said=True)
