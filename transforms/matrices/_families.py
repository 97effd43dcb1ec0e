"""Conventions of families of models, where names and shapes alone leave a choice.

An entry has the axes of one layer, and whether layers may be stacked: MaxText's `query/kernel` is
`(features, layers, heads, head_dim)` with scanned layers and `(features, heads, head_dim)` without.
A bias and norms go before the convention: an entry that they contradict does not apply.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ._evidence import (
    Parameters,
    fits_bias,
    inputs_by_bias,
    inputs_of_experts,
    is_scanned,
    layer_axes,
)
from ._form import MatrixAxes, Reading, Readings, behind, kernel_axes
from ._names import (
    Shapes,
    bias_of,
    is_convolution,
    is_depthwise,
    is_local,
    is_named_matrix,
    is_transposed,
)
from ._readings import FROM_HEADS, HEADS, HEADS_FIRST, axes_of, heads_come_first, with_layers

EVIDENT, ASSUMED, ONLY_EVIDENT, ONLY_ASSUMED = "evident", "assumed", "only evident", "only assumed"
"""Stacks of layers: where a bias or norms say so, or also without; "only" if one layer alone is not
of the entry."""


class FamilyEntry(NamedTuple):
    """The treatment of a parameter, if its path and the number of its axes fit."""

    pattern: str  # a regular expression for the whole path
    axes: MatrixAxes | str | Callable[[int], MatrixAxes]  # a string says why it is not a matrix
    ndims: tuple[int, ...]  # of one layer
    fits: Callable[[str, Parameters], bool | None] = lambda name, shapes: True  # None: asked
    stacks: str = EVIDENT


@dataclasses.dataclass(frozen=True)
class Family:
    """The conventions of a family of models."""

    name: str
    entries: tuple[FamilyEntry, ...]
    layers: int | None = None  # the axis of layers where nothing tells; None asks

    def __call__(self, name: str, shapes: Parameters) -> MatrixAxes | str | Readings | None:
        """The axes of a parameter, or why it is not a matrix; None if the family does not say."""
        ndim, asked = len(shapes[name]), {}
        for entry in self.entries:
            of_layers = not isinstance(entry.axes, str) and ndim - 1 in entry.ndims
            known = (ndim in entry.ndims or of_layers) and re.fullmatch(entry.pattern, name)
            fits = bool(known) and entry.fits(name, shapes)
            if fits is False:
                continue
            if isinstance(entry.axes, str):
                return f"{entry.axes} ({self.name})"
            fitting = self._fitting(entry, name, shapes)
            if asked or fits is None or len({*fitting.values()}) > 1:
                asked |= {axes: place for place, axes in fitting.items()}
                if fits is None:
                    continue
                break
            for axes in fitting.values():
                return dataclasses.replace(axes, said_by=f"axes of the family {self.name}")
        return self._asked(asked, name, shapes) if asked else None

    def _fitting(
        self, entry: FamilyEntry, name: str, shapes: Parameters
    ) -> dict[int | None, MatrixAxes]:
        """The axes of the entry that a bias and norms allow, by the axis of layers."""
        ndim, layout = len(shapes[name]), entry.axes
        # The height of a kernel may be the number of layers elsewhere by chance.
        evident = layer_axes(name, shapes, near=callable(layout))
        alone = ndim in entry.ndims and not entry.stacks.startswith("only")
        allowed: dict[int | None, MatrixAxes] = {}
        of_layers = [0, 1, *evident - {0, 1}] if ndim - 1 in entry.ndims else []
        for place in ([None] if alone else []) + of_layers:
            axes = layout(ndim - (place is not None)) if callable(layout) else layout
            assert isinstance(axes, MatrixAxes)
            allowed[place] = behind(axes, ndim, place)
        inputs = list(inputs_by_bias(name, shapes))
        exact = {
            place: axes
            for place, axes in allowed.items()
            if bias_of(name, shapes) is not None
            and fits_bias(axes, name, shapes, loose=place is None)
            # `(D, H, K)` with `(H, K)` may be one matrix.
            and not (place == 1 and (0,) in inputs and 1 not in evident)
        }
        if exact or inputs:
            places = {None, *evident} & {*exact} or {*exact}
        elif evident and bias_of(name, shapes) is None:
            places = {*evident}
        else:
            places = {None, *([self.layers or 0] if entry.stacks.endswith("assumed") else [])}
        for certain in (None, self.layers):
            if certain in places and certain in allowed:
                return {certain: allowed[certain]}
        return {place: axes for place, axes in allowed.items() if place in places}

    def _asked(
        self, fitting: Mapping[MatrixAxes, int | None], name: str, shapes: Parameters
    ) -> Readings:
        """The readings that fit, with layers on one axis or the other, and those of the default."""
        shape = shapes[name]
        asked = [
            Reading(axes, f"inputs on axis {axes.rows}")
            if place is None
            else with_layers(shape, axes, place)
            for axes, place in fitting.items()
        ]
        others = axes_of(name, shapes)
        more = others if isinstance(others, tuple) else ()
        return (*asked, *(r for r in more if r.axes not in fitting))


def _is_matrix(name: str, shapes: Shapes) -> bool:
    return is_named_matrix(name, shapes) and not is_depthwise(name, shapes)


def _is_any_conv(name: str, shapes: Shapes) -> bool:
    is_conv = is_convolution(name, len(shapes[name])) and not is_local(name)
    return is_conv and _is_matrix(name, shapes)


def _is_conv(name: str, shapes: Shapes) -> bool:
    return _is_any_conv(name, shapes) and not is_transposed(name)


def _is_transposed_conv(name: str, shapes: Shapes) -> bool:
    return _is_any_conv(name, shapes) and is_transposed(name)


def _has_bias_of_each(name: str, shapes: Shapes) -> bool:
    """Whether each matrix has a bias, as in a convolution with another kernel at each place."""
    shape = shapes[name]
    return is_named_matrix(name, shapes) and bias_of(name, shapes) == (*shape[:-2], shape[-1])


def _equinox_conv(name: str, shapes: Shapes) -> bool:
    """Whether a kernel of three axes is a convolution: by its name, or by its bias `(out, 1)`."""
    shape, bias = shapes[name], bias_of(name, shapes)
    of_bias = len(shape) == 3 and bias == (shape[0], 1)
    return _is_matrix(name, shapes) and (_is_any_conv(name, shapes) or of_bias)


def _inputs_on(axis: int) -> Callable[[str, Parameters], bool | None]:
    """Whether experts have their inputs on this axis; None if nothing tells."""

    def fits(name: str, shapes: Parameters) -> bool | None:
        inputs = inputs_of_experts(name, shapes) if _is_matrix(name, shapes) else 0
        return None if inputs is None else inputs == axis

    return fits


def _is_plain(name: str, shapes: Shapes) -> bool:
    """Whether it has the name of a matrix, and siblings do not say that heads come first."""
    return is_named_matrix(name, shapes) and not heads_come_first(name, shapes)


def _heads_first(name: str, shapes: Shapes) -> bool:
    return heads_come_first(name, shapes) is True


def _heads_last(name: str, shapes: Shapes) -> bool:
    return not heads_come_first(name, shapes)


def _surely_heads_last(name: str, shapes: Shapes) -> bool:
    """The siblings say so, or a bias, which KerasHub's Gemma does not have."""
    return heads_come_first(name, shapes) is False or bias_of(name, shapes) is not None


# Layouts of one layer

_IN_OUT = MatrixAxes(-2, -1)  # (..., in, out)
_OUT_IN = MatrixAxes(-1, -2)  # (..., out, in)
_ENDS = MatrixAxes(0, -1)  # (in, ..., out)


def _kernel(output: int) -> Callable[[int], MatrixAxes]:
    """The axes of a kernel of a convolution with its outputs on one axis; all others are rows."""
    return functools.partial(kernel_axes, output=output)


# Families

_ATTENTION = r".*(attention|attn)\w*"
_FLAX = (
    # Gemma's; keys and values, or all three, are side by side on the first axis.
    FamilyEntry(r"(.*/)?q_einsum/(kernel|w)", HEADS_FIRST, (3,), stacks=ASSUMED),
    FamilyEntry(r"(.*/)?q?kv_einsum/(kernel|w)", HEADS_FIRST, (4,), stacks=ASSUMED),
    FamilyEntry(r"(.*/)?attn_vec_einsum/(kernel|w)", FROM_HEADS, (3,), stacks=ASSUMED),
    FamilyEntry(f"{_ATTENTION}/(query|key|value)/kernel", HEADS, (3,), _heads_last, ASSUMED),
    FamilyEntry(f"{_ATTENTION}/out/kernel", FROM_HEADS, (3,), stacks=ASSUMED),
    FamilyEntry(r".*/kernel", _IN_OUT, (4, 5), _has_bias_of_each),
    FamilyEntry(r".*conv_?local\w*/kernel", _IN_OUT, (3, 4, 5)),
    FamilyEntry(r".*/kernel|kernel", _kernel(-1), (3, 4), _is_conv),
    FamilyEntry(r"(.*/)?\w*experts?\w*(/.*)?", _IN_OUT, (3,), _is_matrix),
    FamilyEntry(r".*", _IN_OUT, (2,), _is_plain, stacks=ONLY_EVIDENT),
)
LINEN = Family("linen", tuple(e._replace(pattern=f"(?i:{e.pattern})") for e in _FLAX))
NNX = Family("nnx", LINEN.entries)
_STACK = r".*layer_stack.*/w"
HAIKU = Family(
    "haiku",
    (
        FamilyEntry(_STACK, _IN_OUT, (2,), stacks=ONLY_ASSUMED),
        FamilyEntry(
            r".*layer_stack.*/w", _kernel(-2), (3, 4, 5), _is_transposed_conv, ONLY_ASSUMED
        ),
        FamilyEntry(r".*layer_stack.*/w", _kernel(-1), (3, 4, 5), _is_conv, ONLY_ASSUMED),
        FamilyEntry(r".*/w", _kernel(-2), (3, 4, 5), _is_transposed_conv),
        FamilyEntry(r".*/w", _kernel(-1), (3, 4, 5), _is_conv),
    ),
    layers=0,
)
EQUINOX = Family(
    "equinox",
    (
        FamilyEntry(r"(.*/)?weight", _kernel(0), (3,), _equinox_conv),
        FamilyEntry(r"(.*/)?weight", _kernel(0), (4, 5), _is_matrix),
        FamilyEntry(r"(.*/)?weight_[ih]h", _OUT_IN, (2,), stacks=ASSUMED),
        FamilyEntry(r"(.*/)?weight", _OUT_IN, (2,), is_named_matrix, stacks=ONLY_EVIDENT),
    ),
)
_EXPERTS = r"(.*[/_.])?experts?[/_.].*"
TORCH_LAYOUT = Family(
    "torch_layout",
    (
        FamilyEntry(_EXPERTS, _OUT_IN, (3,), _inputs_on(-1)),
        FamilyEntry(_EXPERTS, _IN_OUT, (3,), _inputs_on(-2)),
        FamilyEntry(r".*", _OUT_IN, (2,), _is_matrix),
        FamilyEntry(r".*", _kernel(1), (3, 4, 5), _is_transposed_conv),
        FamilyEntry(r".*", _kernel(0), (4, 5), _is_matrix),
        FamilyEntry(r".*", _kernel(0), (3,), _is_conv),
    ),
)
MAXTEXT = Family(
    "maxtext",
    (
        FamilyEntry(r".*MoeBlock\w*/(wi(_\d)?|wo)", _IN_OUT, (3,), stacks=ASSUMED),
        FamilyEntry(r".*\w*conv/kernel", "convolution of a sequence", (3, 4)),
        FamilyEntry(
            r".*mhc\w*/(pre|post|res)_alpha|.*compressor/(.*/)?position_bias",
            _ENDS,
            (2,),
            stacks=ASSUMED,
        ),
        # (groups, layers, in, out)
        FamilyEntry(r".*attention\w*/o_a_proj/kernel", _IN_OUT, (3,), stacks=ASSUMED),
        FamilyEntry(
            r".*attention\w*/(query|key|value|wq_b|wkv_b|wkv|qkv_proj|[qkv]_proj|gate_proj)/kernel",
            MatrixAxes(0, (-2, -1)),
            (3, 4),  # (features, 3, heads, head_dim) if fused
            stacks=ASSUMED,
        ),
        FamilyEntry(r".*attention\w*/(out|o_proj)/kernel", FROM_HEADS, (3,), stacks=ASSUMED),
        FamilyEntry(r".*/kernel", _IN_OUT, (2,), is_scanned, stacks=ONLY_ASSUMED),
    ),
    layers=1,
)
_KERAS_DEPTHWISE = r"(.*/)?\w*(depthwise|dw_?conv|(?<![a-z])dw(?![a-z]))\w*/kernel"
KERAS = Family(
    "keras",
    (
        # KerasHub's Gemma has (heads, features, head_dim).
        FamilyEntry(r".*/(query|key|value)/kernel", HEADS_FIRST, (3,), _heads_first),
        FamilyEntry(r".*/(query|key|value)/kernel", HEADS, (3,), _surely_heads_last),
        FamilyEntry(r".*/attention_output/kernel", FROM_HEADS, (3,)),
        # (height, width, in, multiplier)
        FamilyEntry(r".*/depthwise_kernel", "depthwise convolution", (3, 4)),
        FamilyEntry(_KERAS_DEPTHWISE, "depthwise convolution", (3, 4)),
        FamilyEntry(r"(.*/)?\w*conv\w*transpose\w*/kernel", _kernel(-2), (3, 4, 5)),
        FamilyEntry(r"(.*/)?\w*conv\w*/(pointwise_)?kernel", _kernel(-1), (3, 4, 5)),
    ),
)
HF_FLAX = Family(
    "hf_flax",
    (
        # FlaxConv1D of GPT-2 stores (out, in), unless a bias contradicts; queries, keys and values
        # are side by side.
        FamilyEntry(r".*/attn/c_attn/kernel", MatrixAxes(1, 0, column_heads=3), (2,)),
        FamilyEntry(r".*/attn/c_attn/kernel", MatrixAxes(0, 1, column_heads=3), (2,)),
        FamilyEntry(
            r".*/(attn|crossattention|mlp)/(c_proj|c_fc|q_attn)/kernel", MatrixAxes(1, 0), (2,)
        ),
        FamilyEntry(r".*/crossattention/c_attn/kernel", MatrixAxes(1, 0, column_heads=2), (2,)),
        FamilyEntry(r".*/crossattention/c_attn/kernel", MatrixAxes(0, 1, column_heads=2), (2,)),
        *LINEN.entries,
    ),
)
