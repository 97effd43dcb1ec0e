"""Arrays that know their axes: rows, columns and batch axes from their boxes.

- Haliax' `NamedArray` names its axes. The layer around it (`Linear`, `MoELinear`, `Conv`) knows
  which of them are inputs, `In`, and outputs, `Out`; all others are layers or experts. Without such
  a layer, names like `layers`, `heads` and `head_size` tell.
- Simply's `AnnotatedArray` has a letter for each axis: "i" is an input, "o" an output, "." neither.

The boxes are recognized by their attributes, so that no package is imported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._paths import NamedLeaves, is_hole
from ._form import MatrixAxes
from ._names import is_head_name, is_output_first, layer_place, why_no_matrix

_BATCH = re.compile(r"(layers?|blocks?|stack(ed)?|experts?|q?kv)(_\d+)?")
_HEAD_AXIS = re.compile(r"(\w+_)?(heads?|groups?)\w*")


def annotated(params: Any, named: NamedLeaves) -> dict[str, MatrixAxes | str]:
    """The axes, or the reason why it is not a matrix, of each parameter whose box tells."""
    names = iter(named.names)  # of leaves, in the order of the boxes around them
    found: dict[str, MatrixAxes | str] = {}
    for node in jax.tree.leaves(params, is_leaf=lambda x: _tells(x) or is_hole(x)):
        boxes = jax.tree.leaves(node, is_leaf=lambda x: _has_axis_names(x) or is_hole(x))
        for box in boxes:
            own = list(itertools.islice(names, len(jax.tree.leaves(box, is_leaf=is_hole))))
            axes = _axes_of_box(own[0], box, node) if _has_axis_names(box) else None
            if axes is not None:
                found[own[0]] = axes
    return found


def _tells(node: Any) -> bool:
    return _has_axis_names(node) or _is_layer(node)


def _has_axis_names(x: Any) -> bool:
    return _letters(x) is not None or _annotated_axes(x) is not None


def _is_layer(x: Any) -> bool:
    has_ends = getattr(x, "In", None) is not None and getattr(x, "Out", None) is not None
    return has_ends and _annotated_axes(getattr(x, "weight", None)) is not None


def _letters(x: Any) -> str | None:
    letters = getattr(x, "dim_annotation", None)
    return letters if isinstance(letters, str) and hasattr(x, "array") else None


def _annotated_axes(x: Any) -> tuple[str, ...] | None:
    axes = getattr(x, "axes", None)
    if not (hasattr(x, "array") and isinstance(axes, tuple)):
        return None
    return tuple(_listed(axes))


def _listed(spec: Any) -> Iterator[str]:
    """The names of axes that are given as names, as axes, or as several of either."""
    if isinstance(spec, str) or hasattr(spec, "name"):
        yield spec if isinstance(spec, str) else spec.name
    else:
        yield from itertools.chain.from_iterable(map(_listed, spec))


def _axes_of_box(name: str, box: Any, node: Any) -> MatrixAxes | str | None:
    letters, axes = _letters(box), _annotated_axes(box)
    if letters is not None:
        return _axes_of_ends([{"i": 0, "o": 1}.get(letter) for letter in letters], "simply")
    reason = why_no_matrix(name)
    if axes is None or reason is not None:
        return reason
    if _is_layer(node) and layer_place(name).within == "/weight":
        return _of_layer(axes, node)
    if "vocab" in axes and not is_head_name(layer_place(name).layer):
        return "embedding"
    return _by_names(name, axes)


def _of_layer(axes: Sequence[str], layer: Any) -> MatrixAxes | str:
    inputs = {*_listed(layer.In), *_listed(getattr(layer, "Spatial", ()))}
    outputs = {axis for axis in _listed(layer.Out) if not _BATCH.fullmatch(axis)}  # not "qkv"
    if getattr(layer, "groups", 1) > 1 and layer.weight.axes[axes.index(layer.In.name)].size == 1:
        return "depthwise convolution (haliax)"
    ends = [0 if axis in inputs else 1 if axis in outputs else None for axis in axes]
    return _axes_of_ends(ends, "haliax")


def _by_names(name: str, axes: Sequence[str]) -> MatrixAxes | str | None:
    """Heads are one side, and the rest is the other; None if nothing separates two sides."""
    lower = [axis.lower() for axis in axes]
    own = [i for i, axis in enumerate(lower) if not _BATCH.fullmatch(axis)]
    heads = [i for i in own if _HEAD_AXIS.fullmatch(lower[i])]
    others = [i for i in own if i not in heads]
    if len(own) == 2:
        heads, others = own[:1], own[1:]
    if not (heads and others):
        vector = "vector" if len(axes) == 1 else "a vector per layer"
        return vector if len(own) <= 1 or heads else None
    first, second = sorted((heads, others))
    rows, columns = (second, first) if is_output_first(name) else (first, second)
    return _axes_of_ends(
        [0 if i in rows else 1 if i in columns else None for i in range(len(axes))]
    )


def _axes_of_ends(ends: Sequence[int | None], family: str = "haliax") -> MatrixAxes | str:
    """The axes, from an end of each: 0 an input, 1 an output, None neither."""
    rows, columns = ([i for i, end in enumerate(ends) if end == side] for side in (0, 1))
    if not (rows and columns):
        return f"no inputs or no outputs ({family})"
    merged = [axes[0] if len(axes) == 1 else tuple(axes) for axes in (rows, columns)]
    return MatrixAxes(merged[0], merged[1], said_by=f"axes of the family {family}")
