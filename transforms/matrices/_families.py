"""What the parameters of a family of models are, where names and shapes alone leave a choice.

A `Family` is a list of entries, of which the first that fits a parameter decides; the rule decides
on all others. Axes are counted from the end where layers may be stacked in front of them: MaxText's
`query/kernel` is `(features, layers, heads, head_dim)` with scanned layers and `(features, heads,
head_dim)` without.

What is a choice in one family is a convention in another: `(16, 8, 3)` is a convolution in Equinox,
and 16 scanned layers of `8 × 3` in Linen, if a norm beside it has 16 layers too (`_in_stack`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

from ._form import MatrixAxes
from ._names import (
    Shapes,
    bias_of,
    is_convolution,
    is_depthwise,
    is_named_matrix,
    is_of_norm,
)


@dataclasses.dataclass(frozen=True)
class FamilyAxes(MatrixAxes):
    """Axes that a family decided on; `summarize` says so."""

    family: str = ""


class Entry(NamedTuple):
    """What a parameter is, if its path and the number of its axes fit."""

    pattern: str  # a regular expression for the whole path
    axes: MatrixAxes | str | Callable[[int], MatrixAxes]  # a string says why it is not a matrix
    ndims: tuple[int, ...]
    fits: Callable[[str, Shapes], bool] = lambda name, shapes: True
    per_head: MatrixAxes | None = None  # with `head_wise`


@dataclasses.dataclass(frozen=True)
class Family:
    """The conventions of a family of models."""

    name: str
    entries: tuple[Entry, ...]

    def __call__(self, name: str, shapes: Shapes, *, head_wise: bool) -> MatrixAxes | str | None:
        """The axes of a parameter, or why it is not a matrix; None if the family does not say."""
        ndim = len(shapes[name])
        for entry in self.entries:
            if ndim not in entry.ndims or not re.fullmatch(entry.pattern, name):
                continue
            if not entry.fits(name, shapes):
                continue
            axes = entry.per_head if head_wise and entry.per_head else entry.axes
            if isinstance(axes, str):
                return f"{axes} ({self.name})"
            axes = axes if isinstance(axes, MatrixAxes) else axes(ndim)
            return FamilyAxes(**vars(axes), family=self.name)
        return None


# Evidence


def _in_stack(name: str, shapes: Shapes) -> bool:
    """Whether the parameter's layers are stacked along axis 0, as a bias or a norm tells.

    With layers its bias is `(layers, out)`. Without a bias, the norms of the module around it are
    `(layers, features)`.
    """
    shape = shapes[name]
    bias = bias_of(name, shapes)
    if bias is not None:
        return len(bias) == 2 and bias[0] == shape[0] and bias[1] > 1
    parts = name.split("/")[:-1]
    for end in range(len(parts), -1, -1):
        scope = "".join(f"{part}/" for part in parts[:end])
        norms = [x for other, x in shapes.items() if other.startswith(scope) and is_of_norm(other)]
        if norms:
            return all(len(x) == 2 and x[0] == shape[0] and x[1] > 1 for x in norms)
    return False


def _is_conv(name: str, shapes: Shapes) -> bool:
    return _is_matrix(name, shapes) and is_convolution(name, len(shapes[name]))


def _is_matrix(name: str, shapes: Shapes) -> bool:
    return is_named_matrix(name) and not is_depthwise(name, shapes[name])


def _stacked_matrix(name: str, shapes: Shapes) -> bool:
    return is_named_matrix(name) and _in_stack(name, shapes)


# Layouts

_LAST = MatrixAxes(-2, -1)  # (..., in, out)
_OUTPUT_FIRST = MatrixAxes(-1, -2)  # (..., out, in)
_HEADS = MatrixAxes(-3, (-2, -1))  # (..., features, heads, head_dim)
_ONE_HEAD = MatrixAxes(-3, -1)
_FROM_HEADS = MatrixAxes((-3, -2), -1)  # (..., heads, head_dim, features)
_HEADS_FIRST = MatrixAxes(-2, (-3, -1))  # (..., heads, features, head_dim)


def _output_last(ndim: int) -> MatrixAxes:
    return MatrixAxes(tuple(range(ndim - 1)), ndim - 1)


def _output_first(ndim: int) -> MatrixAxes:
    return MatrixAxes(tuple(range(1, ndim)), 0)


def _output_before_input(ndim: int) -> MatrixAxes:
    """Of a transposed convolution, `(height, width, out, in)`."""
    return MatrixAxes((*range(ndim - 2), ndim - 1), ndim - 2)


# Families

_FLAX = (
    # Gemma's; keys and values, or all three, are side by side on the first axis.
    Entry(r"(.*/)?q_einsum/(kernel|w)", _HEADS_FIRST, (3, 4), per_head=MatrixAxes(-2, -1)),
    Entry(r"(.*/)?q?kv_einsum/(kernel|w)", _HEADS_FIRST, (4, 5)),
    Entry(r"(.*/)?attn_vec_einsum/(kernel|w)", _FROM_HEADS, (3, 4)),
    Entry(r".*", _LAST, (3,), _stacked_matrix),
    Entry(r".*(attention|attn)\w*/(query|key)/kernel", _HEADS, (3, 4), per_head=_ONE_HEAD),
    Entry(r".*(attention|attn)\w*/value/kernel", _HEADS, (3, 4)),
    Entry(r".*(attention|attn)\w*/out/kernel", _FROM_HEADS, (3, 4)),
    Entry(r".*/kernel|kernel", _output_last, (3, 4), _is_conv),
    Entry(r"(.*/)?\w*experts?\w*(/.*)?", _LAST, (3,), _is_matrix),
)
LINEN = Family("linen", tuple(e._replace(pattern=f"(?i:{e.pattern})") for e in _FLAX))
NNX = Family("nnx", LINEN.entries)
HAIKU = Family(
    "haiku",
    (
        Entry(r".*layer_stack.*/w", _LAST, (3,)),
        Entry(r".*/w", _output_last, (3, 4, 5), _is_conv),
    ),
)
EQUINOX = Family(
    "equinox",
    (
        Entry(r"(.*/)?weight", _OUTPUT_FIRST, (3,), _stacked_matrix),
        Entry(r"(.*/)?weight", _output_first, (3, 4, 5), _is_matrix),
        Entry(r"(.*/)?weight_[ih]h", _OUTPUT_FIRST, (2, 3)),
    ),
)
TORCH_LAYOUT = Family(
    "torch_layout",
    (
        Entry(r"(.*[/_.])?experts?[/_.].*", _OUTPUT_FIRST, (3,), _is_matrix),
        Entry(r".*", _OUTPUT_FIRST, (2,), _is_matrix),
        Entry(r".*", _output_first, (4, 5), _is_matrix),
        Entry(r".*", _output_first, (3,), _is_conv),
    ),
)
MAXTEXT = Family(
    "maxtext",
    (
        Entry(r".*MoeBlock\w*/(wi(_\d)?|wo)", _LAST, (3, 4)),
        Entry(r".*\w*conv/kernel", "convolution of a sequence", (3, 4)),
        Entry(
            r".*attention\w*/(query|key)/kernel",
            MatrixAxes(0, (-2, -1)),
            (3, 4),
            per_head=MatrixAxes(0, -1),
        ),
        Entry(
            r".*attention\w*/(value|wq_b|wkv_b|qkv_proj|[qkv]_proj|gate_proj)/kernel",
            MatrixAxes(0, (-2, -1)),
            (3, 4, 5),  # (features, layers, 3, heads, head_dim) if fused
        ),
        Entry(r".*attention\w*/(out|o_proj)/kernel", MatrixAxes((0, -2), -1), (3, 4)),
        Entry(r".*/kernel", MatrixAxes(0, -1), (3,)),
    ),
)
KERAS = Family(
    "keras",
    (
        Entry(r".*/(query|key)/kernel", _HEADS, (3,), per_head=_ONE_HEAD),
        Entry(r".*/value/kernel", _HEADS, (3,)),
        Entry(r".*/attention_output/kernel", _FROM_HEADS, (3,)),
        # (height, width, in, multiplier)
        Entry(r"(.*/)?depthwise\w*/kernel|.*/depthwise_kernel", "depthwise convolution", (3, 4)),
        Entry(r"(.*/)?\w*conv\w*transpose\w*/kernel", _output_before_input, (3, 4, 5)),
        Entry(r"(.*/)?\w*conv\w*/(pointwise_)?kernel", _output_last, (3, 4, 5)),
    ),
)
HF_FLAX = Family(
    "hf_flax",
    (
        # FlaxConv1D of GPT-2 stores (out, in); queries, keys and values side by side.
        Entry(r".*/attn/c_attn/kernel", MatrixAxes(1, 0, column_heads=3), (2,)),
        Entry(r".*/(attn|crossattention|mlp)/(c_proj|c_fc|q_attn)/kernel", MatrixAxes(1, 0), (2,)),
        Entry(r".*/crossattention/c_attn/kernel", MatrixAxes(1, 0, column_heads=2), (2,)),
        *LINEN.entries,
    ),
)
