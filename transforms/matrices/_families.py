"""Conventions of families of models, where names and shapes alone leave a choice.

Axes are counted from the end where layers may be stacked in front of them: MaxText's `query/kernel`
is `(features, layers, heads, head_dim)` with scanned layers and `(features, heads, head_dim)`
without.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from ._evidence import is_in_stack, is_scanned
from ._form import MatrixAxes, kernel_axes
from ._names import Shapes, bias_of, is_convolution, is_depthwise, is_named_matrix


class FamilyEntry(NamedTuple):
    """The treatment of a parameter, if its path and the number of its axes fit."""

    pattern: str  # a regular expression for the whole path
    axes: MatrixAxes | str | Callable[[int], MatrixAxes]  # a string says why it is not a matrix
    ndims: tuple[int, ...]
    fits: Callable[[str, Shapes], bool] = lambda name, shapes: True
    per_head: MatrixAxes | None = None  # with `head_wise`


@dataclasses.dataclass(frozen=True)
class Family:
    """The conventions of a family of models."""

    name: str
    entries: tuple[FamilyEntry, ...]

    def __call__(self, name: str, shapes: Shapes, *, head_wise: bool) -> MatrixAxes | str | None:
        """The axes of a parameter, or why it is not a matrix; None if the family does not say."""
        ndim = len(shapes[name])
        for entry in self.entries:
            known = ndim in entry.ndims and re.fullmatch(entry.pattern, name)
            if not (known and entry.fits(name, shapes)):
                continue
            axes = entry.per_head if head_wise and entry.per_head else entry.axes
            if isinstance(axes, str):
                return f"{axes} ({self.name})"
            axes = axes if isinstance(axes, MatrixAxes) else axes(ndim)
            return dataclasses.replace(axes, said_by=f"axes of the family {self.name}")
        return None


def _is_conv(name: str, shapes: Shapes) -> bool:
    return _is_matrix(name, shapes) and is_convolution(name, len(shapes[name]))


def _is_matrix(name: str, shapes: Shapes) -> bool:
    return is_named_matrix(name) and not is_depthwise(name, shapes)


def _stacked_matrix(name: str, shapes: Shapes) -> bool:
    return is_named_matrix(name) and is_in_stack(name, shapes)


def _equinox_conv(name: str, shapes: Shapes) -> bool:
    """Whether a kernel of three axes is a convolution: by its name, or by its bias `(out, 1)`."""
    shape, bias = shapes[name], bias_of(name, shapes)
    return _is_matrix(name, shapes) and (_is_conv(name, shapes) or bias == (shape[0], 1))


# Layouts

_LAST = MatrixAxes(-2, -1)  # (..., in, out)
_ENDS = MatrixAxes(0, -1)  # (in, ..., out)
_OUTPUT_FIRST = MatrixAxes(-1, -2)  # (..., out, in)
_HEADS = MatrixAxes(-3, (-2, -1))  # (..., features, heads, head_dim)
_ONE_HEAD = MatrixAxes(-3, -1)
_FROM_HEADS = MatrixAxes((-3, -2), -1)  # (..., heads, head_dim, features)
_HEADS_FIRST = MatrixAxes(-2, (-3, -1))  # (..., heads, features, head_dim)


_output_first, _output_last = (
    functools.partial(kernel_axes, output_first=first) for first in (True, False)
)


def _output_before_input(ndim: int) -> MatrixAxes:
    """The axes of a transposed convolution, `(height, width, out, in)`."""
    return MatrixAxes((*range(ndim - 2), ndim - 1), ndim - 2)


# Families

_FLAX = (
    # Gemma's; keys and values, or all three, are side by side on the first axis.
    FamilyEntry(r"(.*/)?q_einsum/(kernel|w)", _HEADS_FIRST, (3, 4), per_head=MatrixAxes(-2, -1)),
    FamilyEntry(r"(.*/)?q?kv_einsum/(kernel|w)", _HEADS_FIRST, (4, 5)),
    FamilyEntry(r"(.*/)?attn_vec_einsum/(kernel|w)", _FROM_HEADS, (3, 4)),
    FamilyEntry(r".*", _LAST, (3,), _stacked_matrix),
    FamilyEntry(r".*(attention|attn)\w*/(query|key)/kernel", _HEADS, (3, 4), per_head=_ONE_HEAD),
    FamilyEntry(r".*(attention|attn)\w*/value/kernel", _HEADS, (3, 4)),
    FamilyEntry(r".*(attention|attn)\w*/out/kernel", _FROM_HEADS, (3, 4)),
    FamilyEntry(r".*/kernel|kernel", _output_last, (3, 4), _is_conv),
    FamilyEntry(r"(.*/)?\w*experts?\w*(/.*)?", _LAST, (3,), _is_matrix),
)
LINEN = Family("linen", tuple(e._replace(pattern=f"(?i:{e.pattern})") for e in _FLAX))
NNX = Family("nnx", LINEN.entries)
HAIKU = Family(
    "haiku",
    (
        FamilyEntry(r".*layer_stack.*/w", _LAST, (3,)),
        FamilyEntry(r".*/w", _output_last, (3, 4, 5), _is_conv),
    ),
)
EQUINOX = Family(
    "equinox",
    (
        FamilyEntry(r"(.*/)?weight", _OUTPUT_FIRST, (3,), _stacked_matrix),
        FamilyEntry(r"(.*/)?weight", _output_first, (3,), _equinox_conv),
        FamilyEntry(r"(.*/)?weight", _output_first, (4, 5), _is_matrix),
        FamilyEntry(r"(.*/)?weight_[ih]h", _OUTPUT_FIRST, (2, 3)),
    ),
)
TORCH_LAYOUT = Family(
    "torch_layout",
    (
        FamilyEntry(r"(.*[/_.])?experts?[/_.].*", _OUTPUT_FIRST, (3,), _is_matrix),
        FamilyEntry(r".*", _OUTPUT_FIRST, (2,), _is_matrix),
        FamilyEntry(r".*", _output_first, (4, 5), _is_matrix),
        FamilyEntry(r".*", _output_first, (3,), _is_conv),
    ),
)
MAXTEXT = Family(
    "maxtext",
    (
        FamilyEntry(r".*MoeBlock\w*/(wi(_\d)?|wo)", _LAST, (3, 4)),
        FamilyEntry(r".*\w*conv/kernel", "convolution of a sequence", (3, 4)),
        FamilyEntry(
            r".*mhc\w*/(pre|post|res)_alpha|.*compressor/(.*/)?position_bias", _ENDS, (2, 3)
        ),
        FamilyEntry(r".*attention\w*/o_a_proj/kernel", _LAST, (3, 4)),  # (groups, layers, in, out)
        FamilyEntry(
            r".*attention\w*/(query|key)/kernel",
            MatrixAxes(0, (-2, -1)),
            (3, 4),
            per_head=MatrixAxes(0, -1),
        ),
        FamilyEntry(
            r".*attention\w*/(value|wq_b|wkv_b|wkv|qkv_proj|[qkv]_proj|gate_proj)/kernel",
            MatrixAxes(0, (-2, -1)),
            (3, 4, 5),  # (features, layers, 3, heads, head_dim) if fused
        ),
        FamilyEntry(r".*attention\w*/(out|o_proj)/kernel", MatrixAxes((0, -2), -1), (3, 4)),
        FamilyEntry(r".*/kernel", _ENDS, (3,), is_scanned),
    ),
)
_KERAS_DEPTHWISE = r"(.*/)?\w*(depthwise|dw_?conv|(?<![a-z])dw(?![a-z]))\w*/kernel"
KERAS = Family(
    "keras",
    (
        FamilyEntry(r".*/(query|key)/kernel", _HEADS, (3,), per_head=_ONE_HEAD),
        FamilyEntry(r".*/value/kernel", _HEADS, (3,)),
        FamilyEntry(r".*/attention_output/kernel", _FROM_HEADS, (3,)),
        # (height, width, in, multiplier)
        FamilyEntry(r".*/depthwise_kernel", "depthwise convolution", (3, 4)),
        FamilyEntry(_KERAS_DEPTHWISE, "depthwise convolution", (3, 4)),
        FamilyEntry(r"(.*/)?\w*conv\w*transpose\w*/kernel", _output_before_input, (3, 4, 5)),
        FamilyEntry(r"(.*/)?\w*conv\w*/(pointwise_)?kernel", _output_last, (3, 4, 5)),
    ),
)
HF_FLAX = Family(
    "hf_flax",
    (
        # FlaxConv1D of GPT-2 stores (out, in); queries, keys and values side by side.
        FamilyEntry(r".*/attn/c_attn/kernel", MatrixAxes(1, 0, column_heads=3), (2,)),
        FamilyEntry(
            r".*/(attn|crossattention|mlp)/(c_proj|c_fc|q_attn)/kernel", MatrixAxes(1, 0), (2,)
        ),
        FamilyEntry(r".*/crossattention/c_attn/kernel", MatrixAxes(1, 0, column_heads=2), (2,)),
        *LINEN.entries,
    ),
)
