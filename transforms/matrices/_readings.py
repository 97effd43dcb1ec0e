"""Along which axes a parameter is a matrix, as far as its name, shape and siblings tell.

With more than two axes several readings may fit, and the evidence (`docs/matrices.md`) leaves some
of them: that of the other factor of LoRA, then the bias, the siblings and the sizes. If one is
left, and it is not a stack, it decides: users say which layers they stack. Otherwise `axes_of`
returns the readings, for the error that asks which of them is right.
"""

import math
import re
from collections.abc import Callable, Sequence

from ._form import MatrixAxes, Reading, Readings, behind, kernel_axes, merged, reading, stacked
from ._names import LOCAL, OF_MLP, SPELLED, TRANSPOSED
from ._parameters import Parameter

HEADS = MatrixAxes(0, (1, 2))  # (features, heads, head_dim)
FROM_HEADS = MatrixAxes((-3, -2), -1)  # (..., heads, head_dim, features)
HEADS_FIRST = MatrixAxes(-2, (-3, -1))  # (..., heads, features, head_dim)


def axes_of(p: Parameter) -> MatrixAxes | Readings:
    """The axes of a parameter with two axes or more, or the readings among which a user chooses."""
    if p.ndim == 2:
        return MatrixAxes(*ends_of(p))
    said_by = (_lora_factors, _attention, _scanned_attention, _convolution, _others)
    readings = next(filter(None, (readings_of(p) for readings_of in said_by)))
    first, *others = readings
    by_bias = p.bias is not None and p.is_named and len(p.bias) < p.ndim == len(first.axes.named)
    if not others and (by_bias or not first.ambiguous):
        return first.axes
    return besides(_of_layers(p), readings)


def choices_of(p: Parameter) -> Readings:
    """The readings among which a user chooses, if there is a choice."""
    axes = axes_of(p)
    return axes if isinstance(axes, tuple) else ()


def _of_layers(p: Parameter) -> Readings:
    """The readings of stacked layers, where norms say along which axis they are."""
    places = {0} if p.in_stage else {*p.layer_axes()} if p.scope_of_norms is not None else set()
    found: list[Reading] = []
    for place in sorted(places):
        one = axes_of(p.tree.of_one_layer[place].each[p.name])
        axes = one if isinstance(one, MatrixAxes) else one[0].axes
        found.append(stacked(p.shape, axes, place))
    return tuple(r for r in found if p.fits_bias(r.axes))


def ends_of(p: Parameter) -> tuple[int, int]:
    """The axis of the inputs and that of the outputs, of a parameter with two axes."""
    fits = [axis for axis in (0, 1) if p.shape[axis] == p.width]
    output = fits[0] if len(fits) == 1 else 0 if p.output_first else 1
    return 1 - output, output


def _narrowed(readings: Readings, *tests: Callable[[Reading], bool]) -> Readings:
    """The readings that pass each test, unless none does."""
    for test in tests:
        readings = tuple(filter(test, readings)) or readings
    return readings


def besides(first: Readings, others: Readings) -> Readings:
    """All readings, each once."""
    return (*first, *(r for r in others if r.axes not in [x.axes for x in first]))


# Attention


def _attention(p: Parameter) -> Readings:
    """The readings of `(D, H, K)`, or of an `out (H, K, D)`; none if it is not of attention."""
    if p.ndim != 3 or p.role is None or _is_of_mlp(p):
        return ()
    out = p.role == "out"
    last, first, layers = _by_siblings(p)
    usual = _heads(p, FROM_HEADS if out else HEADS)
    # Whether the siblings say so, by reading
    said = {usual: last or (out and first), reading(p.shape, MatrixAxes(1, 2)): layers}
    if not out:
        said[_heads(p, HEADS_FIRST)] = first
    fitting = tuple(r for r in said if p.fits_bias(r.axes))
    if not fitting:
        by_siblings = tuple(filter(said.get, said))
        return besides(by_siblings, _by_bias(p) or _others(p)) if by_siblings else ()
    left = _narrowed(fitting, lambda r: said[r])
    if _is_by_size(p) and usual in left:
        return (usual,)
    if p.bias is not None or any(said.values()):
        return left
    return _left(p, besides(left, _readings_of(p, _MERGED[3])))


def _scanned_attention(p: Parameter) -> Readings:
    """The readings of the same behind or before an axis of layers, or of heads first."""
    if p.ndim != 4 or p.role is None or _is_of_mlp(p):
        return ()
    if p.bias is not None and len(p.bias) == 1 and p.bias[0] in p.shape:
        return ()  # layers would be an axis of the bias too
    usual = FROM_HEADS if p.role == "out" else HEADS
    both = tuple(stacked(p.shape, usual, axis) for axis in (0, 1))
    both = _narrowed(both, lambda r: p.fits_bias(r.axes))
    out, turned = p.sibling("out"), (*p.shape[:2], p.shape[3], p.shape[2])
    if p.role == "out" or (p.bias is not None if out is None else out.shape != turned):
        return both
    heads_first = _heads(p, HEADS_FIRST, ambiguous=True)
    return (*both, heads_first) if out is None else (heads_first, *both)


def _heads(p: Parameter, axes: MatrixAxes, *, ambiguous: bool = False) -> Reading:
    """The reading of axes with heads and their dimension as one side."""
    axes = behind(axes, p.ndim, None)
    heads, dim = next(p.sizes(x) for x in axes.positions(p.ndim)[1:] if len(x) == 2)
    return Reading(axes, f"{heads} heads of {dim}", ambiguous)


def _by_siblings(p: Parameter) -> tuple[bool, bool, bool]:
    """Whether three axes fit one layer, with heads after features or first, or a stack.

    Keys and values have the same heads as queries or fewer, and as a rule the same features.
    """
    parts = {role: p.sibling(role) for role in SPELLED}
    query, out = parts["query"] or (p if p.role != "out" else None), parts["out"]
    if query is None or out is None or query.ndim != 3:
        return False, False, False
    (a, b, c), o = query.shape, out.shape
    last = o[:2] == (b, c) if out.ndim == 3 else o[:1] == (b * c,)
    first = o == (a, c, b)
    layers = out.ndim == 3 and o[:2] == (a, c) and len(out.bias or o) > 1
    layers &= math.prod(o[:-1]) != o[-1]
    for key in (parts["key"], parts["value"]):
        if key is not None and key.ndim == 3:
            # Of a cross-attention, keys have other features.
            like = key.shape[1:] == (b, c) or (not last and key.shape[2] == c)
            first &= a % key.shape[0] == 0 and like
            last &= b % key.shape[1] == 0 and key.shape[2] == c
            last &= not first or key.shape[0] == a
            layers &= key.shape[0] == a
    return last, first, layers


def heads_come_first(p: Parameter) -> bool | None:
    """Whether a query, key or value is `(heads, features, head_dim)`, as the siblings have it.

    None if `(features, heads, head_dim)` fits too, as with as many features as heads.
    """
    if p.ndim != 3 or p.role in ("out", None):
        return False
    last, first, _ = _by_siblings(p)
    return None if first and last else first


def _is_by_size(p: Parameter) -> bool:
    """`D = H·K` is not a coincidence: a stack has fewer layers than a layer has elements."""
    if p.role == "out":
        return p.shape[0] * p.shape[1] == p.shape[2]
    query = p.sibling("query") or p
    features, heads, dim = query.shape if query.ndim == 3 else p.shape
    return features == heads * dim


def _is_of_mlp(p: Parameter) -> bool:
    """Whether it is `wo` beside `wi`, and not beside queries."""
    beside = any(OF_MLP.fullmatch(other.place.layer) for other in p.beside)
    return p.role == "out" and beside and p.sibling("query") is None


# Convolutions


def _convolution(p: Parameter) -> Readings:
    """The readings of a kernel of a convolution; none if it is not one.

    A bias that fits one axis only says which has the outputs, also beside the inputs, as in a
    transposed convolution, whose name alone does not tell.
    """
    ndim, bias, width = p.ndim, p.bias, p.width
    of_equinox = p.output_first and bias == (p.shape[0],) + (1,) * (ndim - 2) != p.shape[:-1]
    of_bias = bias is not None and len(bias) == 1 and width in p.shape and not p.may_share_bias
    if not (p.is_named and (of_equinox or (of_bias and ndim > 3) or p.is_convolution)):
        return ()
    is_local, is_transposed = p.is_called(LOCAL), p.is_called(TRANSPOSED)
    ends = (0, 1, ndim - 1) if p.output_first else (ndim - 1, ndim - 2, 0)
    named, swapped, other = (_kernel(p, end) for end in ends)
    if width is not None and not is_local:
        fits = [end for end in dict.fromkeys((*ends, *range(ndim))) if p.shape[end] == width]
        if not fits or (ends[0] in fits and not (is_transposed and ends[1] in fits)):
            return (named,)
        return _narrowed(tuple(_kernel(p, end) for end in fits), lambda r: _is_square(p, r))
    layers = _stacked_kernels(p)
    if is_transposed and bias is None:
        return (named, swapped, *layers[:2])
    if bias is not None or is_local:
        fitting = tuple(r for r in layers if p.fits_bias(r.axes)) or _by_bias(p)
        both = besides(fitting, (named,)) if p.has_bias_of_places else fitting
        return both if fitting else (named, *layers[:1])
    square = [r for r in (named, other) if ndim == 4 and _is_square(p, r)]
    if (ndim == 3 or named in square) and not p.layer_axes(near=True):
        return (named,)
    return (*dict.fromkeys((named, *square)), *layers)


def _stacked_kernels(p: Parameter) -> Readings:
    """The readings of a kernel behind axes of layers, or with layers on axis 1."""
    ndim, first = p.ndim, p.output_first
    if p.is_called(LOCAL) or (ndim == 3 and p.layer_axes(near=True)):
        return _readings_of(p, ((-2, -1),), first)
    layers = tuple(
        reading(p.shape, kernel_axes(ndim, output=n + end if first else -1 - end, layers=n))
        for n in range(1, ndim - 2)
        for end in range(1 + p.is_called(TRANSPOSED))
    )
    second = stacked(p.shape, kernel_axes(ndim - 1, output=0 if first else -1), 1)
    return (*layers, second) if ndim > 3 and _is_square(p, second) else layers


def _kernel(p: Parameter, output: int) -> Reading:
    place = {0: "first", p.ndim - 1: "last"}.get(output, str(output))
    return Reading(kernel_axes(p.ndim, output=output), f"a convolution, output axis {place}")


def _is_square(p: Parameter, kernel: Reading) -> bool:
    """Whether the kernel is as high as wide under this reading."""
    _, inputs, (output,) = kernel.axes.positions(p.ndim)
    spatial = inputs[1:] if output in (0, 1) else inputs[:-1]  # the channels are beside each other
    return len({p.shape[axis] for axis in spatial}) == 1


def _by_bias(p: Parameter) -> Readings:
    """The readings whose inputs are the axes that a bias lacks.

    The others are outputs, or all but the last of them are of layers.
    """
    return tuple(
        reading(p.shape, MatrixAxes(merged(inputs), merged(others[k:])))
        for inputs, others in p.sides_by_bias
        for k in reversed(range(len(others)))
    )


# Factors of LoRA, and of latent attention

_FACTOR = re.compile(r"(.*lora_?|w?(?:q|kv)_)([abAB])")
_OTHER = dict(zip("abAB", "baBA", strict=True))


def _lora_factors(p: Parameter) -> Readings:
    """The readings of `lora_a (..., r)` beside `lora_b (r, ...)`, in both behind stacked layers."""
    factor = _FACTOR.fullmatch(p.place.layer)
    other = factor and p.tree.get(p.place.beside(factor[1] + _OTHER[factor[2]]))
    if not (factor and other):
        return ()
    is_first = factor[2] in "aA"
    a, b = (p.shape, other) if is_first else (other, p.shape)
    # The outputs may begin with an axis of queries, keys and values, or of keys and values.
    module = p.place.scope.rstrip("/").rpartition("/")[2]
    fused = re.search(r"(?<![a-z])(q?kv)(?![a-z])", module)
    parts = len(fused[1]) if fused is not None else None

    def behind_layers(k: int) -> Reading:
        is_fused = p.ndim - k > 2 and p.shape[k + 1] == parts
        rest = (*range(k + 1 + is_fused, p.ndim),)
        first = MatrixAxes(merged((*range(k, p.ndim - 1),)), p.ndim - 1)
        axes = first if is_first else MatrixAxes(k, merged(rest))
        return Reading(axes, "a factor of LoRA", ambiguous=k > 0)

    most = min(len(a), len(b)) - 1
    found = tuple(behind_layers(k) for k in range(most) if a[:k] == b[:k] and a[-1] == b[k])
    of_second = len(a) == len(b) == 3 and a[1:] == b[1::-1]
    return (*found, *[stacked(p.shape, MatrixAxes(0, 1), 1)] * of_second)


# Stacks of layers or experts, and merged axes

Ends = Sequence[Sequence[int | tuple[int, ...]]]  # of inputs and outputs
_MERGED: dict[int, Ends] = {
    3: ((0, 2), ((0, 1), 2), (0, (1, 2)), (2, (0, 1)), ((1, 2), 0)),
    4: ((1, (2, 3)), ((1, 2), 3), (0, (2, 3)), ((0, 2), 3)),
}
"""By the number of axes: layers on axis 1, and one end of a matrix that has two axes."""


def _readings_of(p: Parameter, ends: Ends, output_first: bool = False) -> Readings:
    """The readings with these inputs and outputs, or with outputs before inputs."""
    pairs = ((b, a) if output_first else (a, b) for a, b in ends)
    return tuple(reading(p.shape, behind(MatrixAxes(a, b), p.ndim, None)) for a, b in pairs)


def _others(p: Parameter) -> Readings:
    """The readings of any other parameter, also of S5's `B (out, in, 2)`; a bias is evidence."""
    inputs = p.inputs_of_experts
    turned = p.output_first if inputs is None else inputs == -1
    stack = _readings_of(p, ((-2, -1),), turned)
    readings = (*stack, *_readings_of(p, _MERGED.get(p.ndim, ()), turned))
    if p.ndim == 4:
        kernel = _kernel(p, 0 if turned else 3)
        readings = (kernel, *stack) if _is_square(p, kernel) else (*stack, kernel, *readings[1:])
    if p.ndim > 3 and p.swapped:  # the inputs and the outputs, in their order
        readings = besides(readings, _readings_of(p, (p.swapped,), p.output_first))
    if p.shape[-1] == 2:
        readings += _readings_of(p, ((-3, -2), (-2, -3)), not turned)
    if p.is_spectral:
        readings = besides(_readings_of(p, ((0, 1), (1, 0))), readings)
    of_einsum = _einsum(p)
    return _left(p, besides(of_einsum, readings), of_einsum)


def _einsum(p: Parameter) -> Readings:
    """The readings that Gemma's layers have beside those of all others."""
    layer, shape = p.place.layer, p.shape
    if "einsum" not in layer:
        return ()
    if layer.startswith("gat"):
        # The other layer has the features and outputs the other way round.
        others = [other.shape[-2:] for other in p.beside]
        turned = shape[-2] != shape[-1] and shape[-2:] in others
        return _readings_of(p, ((-2, -1), (-1, -2))[:: -1 if turned else 1])
    layout = FROM_HEADS if "vec" in layer or "out" in layer else HEADS_FIRST
    return (_heads(p, layout, ambiguous=True),)


def _left(p: Parameter, readings: Readings, kept: Readings = ()) -> Readings:
    """Without those that the bias, a router or the siblings exclude, unless they exclude all.

    The siblings do not exclude those `kept`.
    """
    swapped, experts = p.swapped, p.axis_of_experts
    loose = experts == 1 and p.ndim == 3 and p.role is None
    if loose:
        readings = tuple(r for r in readings if 1 not in r.axes.named)
    fitting = tuple(r for r in readings if p.fits_bias(r.axes, loose=loose, shared=True))
    shared = p.may_share_bias and len(p.bias or ()) == 1
    if shared or all(r.ambiguous and 0 in r.axes.named for r in fitting):  # no stack on axis 0
        fitting = besides(fitting, _by_bias(p))
    return _narrowed(
        fitting or readings,
        lambda r: not swapped or {*r.axes.named} == {*swapped} or r in kept,
        lambda r: experts != 0 or 0 not in r.axes.named,
    )
