"""Conventions of families of models, where names and shapes alone leave a choice.

An entry has the axes of one layer, and whether layers may be stacked: MaxText's `query/kernel` is
`(features, layers, heads, head_dim)` with scanned layers and `(features, heads, head_dim)` without.
A bias and norms go before the convention: an entry that they contradict does not apply.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from ._form import MatrixAxes, Reading, Readings, behind, kernel_axes, stacked
from ._names import DEPTHWISE, LOCAL, TRANSPOSED
from ._parameters import Parameter
from ._readings import FROM_HEADS, HEADS, HEADS_FIRST, besides, choices_of, heads_come_first


class Entry(NamedTuple):
    """The treatment of a parameter, if its path and the number of its axes fit."""

    pattern: str  # a regular expression for the whole path
    axes: MatrixAxes | str | Callable[[int], MatrixAxes]  # a string says why it is not a matrix
    ndims: tuple[int, ...]  # of one layer
    fits: Callable[[Parameter], bool | None] = lambda p: True  # None asks
    assumed: bool = False  # whether layers may be stacked where no bias and no norms say so
    alone: bool = True  # whether one layer alone is of the entry

    def knows(self, p: Parameter) -> bool:
        """Whether the path and the number of axes are of the entry."""
        of_layers = not isinstance(self.axes, str) and p.ndim - 1 in self.ndims
        return (p.ndim in self.ndims or of_layers) and bool(re.fullmatch(self.pattern, p.name))

    def reading(self, p: Parameter, place: int | None) -> Reading:
        """The reading with layers on an axis, or without layers."""
        axes = self.axes(p.ndim - (place is not None)) if callable(self.axes) else self.axes
        assert isinstance(axes, MatrixAxes)
        if place is not None:
            return stacked(p.shape, axes, place)
        axes = behind(axes, p.ndim, None)
        return Reading(axes, f"inputs on axis {axes.rows}")


@dataclasses.dataclass(frozen=True)
class Family:
    """The conventions of a family of models."""

    name: str
    entries: tuple[Entry, ...]
    layers: int | None = None  # the axis of layers where nothing tells; None asks

    def __call__(self, p: Parameter) -> MatrixAxes | str | Readings | None:
        """The axes of a parameter, or why it is not a matrix; None if the family does not say."""
        one = p.in_stage or p
        found: dict[MatrixAxes, Reading] = {}
        sure = True
        for entry in self.entries:
            fits = entry.knows(one) and entry.fits(one)
            if fits is False:
                continue
            if isinstance(entry.axes, str):
                return f"{entry.axes} ({self.name})"
            fitting = self._fitting(entry, one)
            found |= {r.axes: r for r in fitting}
            sure = sure and (fits is True or not fitting)
            if fits and found:
                break
        if not found:
            return None
        sure = sure and len(found) == 1
        readings = (*found.values(),) if sure else besides((*found.values(),), choices_of(one))
        if one is not p:  # layers are behind an axis of stages
            readings = tuple(r._replace(axes=behind(r.axes, p.ndim, 0)) for r in readings)
        if not sure:
            return readings
        return dataclasses.replace(readings[0].axes, said_by=f"axes of the family {self.name}")

    def _fitting(self, entry: Entry, p: Parameter) -> Readings:
        """The readings of the entry that a bias and norms allow, by the axis of layers."""
        # The height of a kernel may be the number of layers elsewhere by chance.
        evident = p.layer_axes(near=callable(entry.axes))
        alone, of_layers = p.ndim in entry.ndims and entry.alone, p.ndim - 1 in entry.ndims
        possible = (*[None] * alone, *[0, 1, *evident - {0, 1}] * of_layers)
        allowed = {place: entry.reading(p, place) for place in possible if _agree(p, place)}
        if p.bias is not None:
            # `(D, H, K)` with `(H, K)` may be one matrix.
            fits = {x for x, r in allowed.items() if p.fits_bias(r.axes, loose=x is None)}
            exact = fits & {None} if p.bias == p.shape[1:] else fits
            likely = {None, *evident} & exact or exact
        else:
            likely = {*evident} or {None, *[self.layers or 0] * entry.assumed}
        certain = [x for x in (None, self.layers) if x in likely and x in allowed][:1]
        if {0, 1} <= likely and p.shape[0] < p.shape[1] and certain == [1]:
            certain = []  # features are more than layers
        return tuple(r for place, r in allowed.items() if place in (certain or likely))


def _agree(p: Parameter, place: int | None) -> bool:
    """Whether queries and outputs beside each other have as many layers and heads."""
    query, out = p.sibling("query"), p.sibling("out")
    if query is None or out is None or not query.ndim == out.ndim == p.ndim:
        return True
    q, o = ([n for i, n in enumerate(x.shape) if i != place] for x in (query, out))
    alike = place is None or query.shape[place] == out.shape[place]
    return alike and (len(q) != 3 or o[0] in q[:2])


# When an entry fits


def _is_matrix(p: Parameter) -> bool:
    return p.is_named and not p.is_depthwise and not p.is_spectral


def _is_conv(p: Parameter, *, transposed: bool = False) -> bool:
    is_conv = p.is_convolution and not p.is_called(LOCAL) and _is_matrix(p)
    return is_conv and p.is_called(TRANSPOSED) == transposed


_is_transposed_conv = functools.partial(_is_conv, transposed=True)


def _is_kernel(p: Parameter) -> bool | None:
    """Whether it is a kernel `(out, in, ...)` of a convolution.

    None if only the number of its axes says so, or that it has no layers.
    """
    # What the default rule decides is something else, such as a factor of LoRA.
    if not _is_matrix(p) or not (p.is_convolution or choices_of(p)):
        return False
    by_name = p.is_convolution and (p.ndim == 4 or bool(p.layer_axes(near=True)))
    return by_name or p.bias is not None or len({*p.shape[2:]}) == 1 or None


def _are_experts(p: Parameter) -> bool:
    """Whether experts come first, unless a router or siblings in an attention say otherwise."""
    return _is_matrix(p) and p.axis_of_experts != 1 and bool(choices_of(p))


def _is_of_places(p: Parameter) -> bool | None:
    """Whether it is a convolution with another kernel at each place, by its name or its biases.

    None if it may be a convolution with a bias at each place.
    """
    of_biases = p.ndim > 3 and p.role is None and p.bias == (*p.shape[:-2], p.shape[-1])
    fits = p.is_named and (p.is_called(LOCAL) or of_biases)
    return None if fits and p.has_bias_of_places else fits


def _equinox_conv(p: Parameter) -> bool | None:
    """Whether a kernel of three axes is a convolution: by its name, or by its bias `(out, 1)`.

    None if it may be layers of one output each.
    """
    of_bias = _is_matrix(p) and p.bias == (p.shape[0], 1)
    by_name = _is_conv(p) or _is_transposed_conv(p)
    return by_name or (None if of_bias and p.shape[1] == 1 else of_bias)


def _inputs_on(axis: int) -> Callable[[Parameter], bool | None]:
    """Whether experts have their inputs on this axis; None if nothing tells."""

    def fits(p: Parameter) -> bool | None:
        inputs = p.inputs_of_experts
        return _is_matrix(p) and (None if inputs is None else inputs == axis)

    return fits


def _heads_last(p: Parameter) -> bool:
    return not heads_come_first(p)


# Layouts of one layer

_IN_OUT = MatrixAxes(-2, -1)  # (..., in, out)
_OUT_IN = MatrixAxes(-1, -2)  # (..., out, in)
_ENDS = MatrixAxes(0, -1)  # (in, ..., out)
_IN_HEADS = MatrixAxes(0, (-2, -1))  # (features, heads, head_dim), (features, 3, heads, head_dim)


def _kernel(output: int) -> Callable[[int], MatrixAxes]:
    """The axes of a kernel of a convolution with its outputs on one axis; all others are rows."""
    return functools.partial(kernel_axes, output=output)


# Families

_ATTENTION = r".*(attention|attn)\w*"
_FLAX = (
    # Gemma's; keys and values, or all three, are side by side on the first axis.
    Entry(r"(.*/)?q_einsum(_\d+)?/(kernel|w)", HEADS_FIRST, (3,), assumed=True),
    Entry(r"(.*/)?q?kv_einsum(_\d+)?/(kernel|w)", HEADS_FIRST, (4,), assumed=True),
    Entry(r"(.*/)?attn_vec_einsum(_\d+)?/(kernel|w)", FROM_HEADS, (3,), assumed=True),
    Entry(f"{_ATTENTION}/(query|key|value)/kernel", HEADS, (3,), _heads_last, assumed=True),
    Entry(f"{_ATTENTION}/out/kernel", FROM_HEADS, (3,), assumed=True),
    Entry(r".*/kernel", _IN_OUT, (3, 4, 5), _is_of_places),
    Entry(r".*/kernel|kernel", _kernel(-1), (3, 4), _is_conv),
    Entry(r"(.*/)?\w*experts?\w*(/.*)?", _IN_OUT, (3,), _are_experts),
    Entry(r".*", _IN_OUT, (2,), lambda p: p.is_named and _heads_last(p), alone=False),
)
LINEN = Family("linen", tuple(e._replace(pattern=f"(?i:{e.pattern})") for e in _FLAX))
NNX = Family("nnx", LINEN.entries)
_STACK = r".*layer_stack.*/w"
HAIKU = Family(
    "haiku",
    (
        Entry(_STACK, _IN_OUT, (2,), assumed=True, alone=False),
        Entry(_STACK, _kernel(-2), (3, 4, 5), _is_transposed_conv, assumed=True, alone=False),
        Entry(_STACK, _kernel(-1), (3, 4, 5), _is_conv, assumed=True, alone=False),
        Entry(r".*/w", _kernel(-2), (3, 4, 5), _is_transposed_conv),
        Entry(r".*/w", _kernel(-1), (3, 4, 5), _is_conv),
    ),
    layers=0,
)
EQUINOX = Family(
    "equinox",
    (
        Entry(r"(.*/)?weight", _kernel(0), (3,), _equinox_conv),
        Entry(r"(.*/)?weight", _kernel(0), (4, 5), _is_kernel),
        Entry(r"(.*/)?weight_[ih]h", _OUT_IN, (2,), assumed=True),
        Entry(r"(.*/)?weight", _OUT_IN, (2,), lambda p: p.is_named, alone=False),
    ),
)
_EXPERTS = r"(.*[/_.])?experts?[/_.].*"
TORCH_LAYOUT = Family(
    "torch_layout",
    (
        Entry(_EXPERTS, _OUT_IN, (3,), _inputs_on(-1), assumed=True),
        Entry(_EXPERTS, _IN_OUT, (3,), _inputs_on(-2), assumed=True),
        Entry(r".*", _OUT_IN, (2,), _is_matrix),
        Entry(r".*", _kernel(1), (3, 4, 5), _is_transposed_conv),
        Entry(r".*", _kernel(0), (4, 5), _is_kernel),
        Entry(r".*", _kernel(0), (3,), _is_conv),
    ),
)
_PARTS = "query|key|value|wq_b|wkv_b|wkv|[qkv]_proj|gate_proj"
MAXTEXT = Family(
    "maxtext",
    (
        Entry(r".*MoeBlock\w*/(wi(_\d)?|wo)", _IN_OUT, (3,), assumed=True),
        Entry(r".*\w*conv/kernel", "convolution of a sequence", (3, 4)),
        Entry(r".*mhc\w*/(pre|post|res)_alpha", _ENDS, (2,), assumed=True),
        Entry(r".*compressor/(.*/)?position_bias", _ENDS, (2,), assumed=True),
        # (in, layers, 2, out), a gate beside the layer that it opens
        Entry(r".*mlp\w*/wi/kernel", _ENDS, (2, 3), assumed=True),
        # (groups, layers, in, out)
        Entry(r".*attention\w*/o_a_proj/kernel", _IN_OUT, (3,), assumed=True),
        Entry(rf".*attention\w*/({_PARTS})/kernel", _IN_HEADS, (3,), assumed=True),
        Entry(r".*attention\w*/qkv_proj/kernel", _IN_HEADS, (3, 4), assumed=True),
        Entry(r".*attention\w*/(out|o_proj)/kernel", FROM_HEADS, (3,), assumed=True),
        Entry(r".*/kernel", _IN_OUT, (2,), lambda p: p.is_scanned, assumed=True, alone=False),
    ),
    layers=1,
)
_KERAS_DEPTHWISE = rf"(.*/)?\w*({DEPTHWISE.pattern})\w*/kernel|.*/depthwise_kernel"
_QKV = r".*/(query|key|value)/kernel"
KERAS = Family(
    "keras",
    (
        # KerasHub's Gemma has (heads, features, head_dim).
        Entry(_QKV, HEADS_FIRST, (3,), lambda p: heads_come_first(p) is True),
        # Its Gemma has no bias.
        Entry(_QKV, HEADS, (3,), lambda p: heads_come_first(p) is False or p.bias is not None),
        Entry(r".*/attention_output/kernel", FROM_HEADS, (3,)),
        # (height, width, in, multiplier)
        Entry(_KERAS_DEPTHWISE, "depthwise convolution", (3, 4)),
        Entry(r"(.*/)?\w*conv\w*transpose\w*/kernel", _kernel(-2), (3, 4, 5)),
        Entry(r"(.*/)?\w*conv\w*/(pointwise_)?kernel", _kernel(-1), (3, 4, 5), _is_matrix),
    ),
)
HF_FLAX = Family(
    "hf_flax",
    (
        # FlaxConv1D of GPT-2 stores (out, in), unless a bias contradicts; queries, keys and values
        # are side by side.
        *(
            Entry(rf".*/{module}/c_attn/kernel", MatrixAxes(*ends, column_heads=parts), (2,))
            for module, parts in (("attn", 3), ("crossattention", 2))
            for ends in ((1, 0), (0, 1))
        ),
        Entry(r".*/(attn|crossattention|mlp)/(c_proj|c_fc|q_attn)/kernel", _OUT_IN, (2,)),
        *LINEN.entries,
    ),
)
NAMES = frozenset(
    family.name for family in (EQUINOX, HAIKU, HF_FLAX, KERAS, LINEN, MAXTEXT, NNX, TORCH_LAYOUT)
)
