"""Arrays that know their axes, recognized by the attributes of their boxes.

- Haliax' `NamedArray` names its axes. The layer around it (`Linear`, `MoELinear`, `Conv`) knows
  which of them are inputs, `In`, and outputs, `Out`; others are layers or experts. Without such a
  layer, names like `layers`, `heads` and `head_size` tell.
- penzai's `NamedArray` names its axes too; outputs that have the name of an input end in "_out".
- Simply's `AnnotatedArray` has a letter for each axis: "i" is an input, "o" an output, "." neither.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from .._paths import NamedLeaves, is_hole
from ._form import MatrixAxes, merged
from ._names import HEAD
from ._parameters import Parameter, Parameters

_BATCH = re.compile(r"(layers?|blocks?|stack(ed)?|experts?|q?kv)(_\d+)?")
_HEAD_AXIS = re.compile(r"(\w+_)?(heads?|groups?)\w*|projection")


def annotated(
    params: Any, named: NamedLeaves, read: Mapping[str, str], parameters: Parameters
) -> dict[str, MatrixAxes | str]:
    """The axes, or the reason why it is not a matrix, of each parameter whose box tells.

    `read` are the names that the rule reads, by path, and `parameters` has these.
    """
    names = iter(named.names)  # of leaves, in the order of the boxes around them
    found: dict[str, MatrixAxes | str | None] = {}
    tells = lambda x: is_hole(x) or _axis_names(x) is not None  # noqa: E731
    for node in jax.tree.leaves(params, is_leaf=lambda x: tells(x) or _is_layer(x)):
        for box in jax.tree.leaves(node, is_leaf=tells):
            path, *_ = itertools.islice(names, len(jax.tree.leaves(box, is_leaf=is_hole)))
            if known := _axis_names(box):
                found[path] = _axes_of_box(parameters.each[read[path]], *known, node)
    return {path: axes for path, axes in found.items() if axes is not None}


def _axis_names(x: Any) -> tuple[str, tuple[str, ...]] | None:
    """The code base of a box, and the names of its axes."""
    if hasattr(x, "data_array"):
        named = tuple(map(str, getattr(x, "named_axes", None) or ()))
        first = len(getattr(x.data_array, "shape", ())) - len(named)  # others have positions
        return ("penzai", (*[""] * first, *named)) if named and first >= 0 else None
    letters, axes = getattr(x, "dim_annotation", None), getattr(x, "axes", None)
    if not hasattr(x, "array"):
        return None
    if isinstance(letters, str):
        return "simply", tuple(letters)
    return ("haliax", tuple(_listed(axes))) if isinstance(axes, tuple) else None


def _is_layer(x: Any) -> bool:
    has_ends = getattr(x, "In", None) is not None and getattr(x, "Out", None) is not None
    return has_ends and _axis_names(getattr(x, "weight", None)) is not None


def _listed(spec: Any) -> Iterator[str]:
    """The names of axes that are given as names, as axes, or as several of either."""
    if isinstance(spec, str) or hasattr(spec, "name"):
        yield spec if isinstance(spec, str) else spec.name
    else:
        yield from itertools.chain.from_iterable(map(_listed, spec))


def _axes_of_box(
    p: Parameter, family: str, axes: Sequence[str], node: Any
) -> MatrixAxes | str | None:
    if family == "simply":
        rows, columns = ([i for i, x in enumerate(axes) if x == end] for end in "io")
        return _axes_of_sides(rows, columns, family)
    if p.reason is not None:
        return p.reason
    if _is_layer(node) and p.place.within == "/weight":
        return _of_layer(axes, node)
    if "vocab" in axes and not HEAD.fullmatch(p.place.layer):
        return "embedding"
    return _by_names(p, axes, family)


def _of_layer(axes: Sequence[str], layer: Any) -> MatrixAxes | str:
    inputs = {*_listed(layer.In), *_listed(getattr(layer, "Spatial", ()))}
    outputs = {axis for axis in _listed(layer.Out) if not _BATCH.fullmatch(axis)}  # not "qkv"
    if getattr(layer, "groups", 1) > 1 and layer.weight.axes[axes.index(layer.In.name)].size == 1:
        return "depthwise convolution (haliax)"
    rows, columns = (
        [i for i, axis in enumerate(axes) if axis in side] for side in (inputs, outputs - inputs)
    )
    return _axes_of_sides(rows, columns, "haliax")


def _by_names(p: Parameter, axes: Sequence[str], family: str) -> MatrixAxes | str | None:
    """Heads are one side, and the rest is the other; None if nothing separates two sides."""
    lower = [axis.lower() for axis in axes]
    apart = [i for i, axis in enumerate(lower) if not _BATCH.fullmatch(axis)]
    outputs = [i for i in apart if lower[i].endswith("_out")]
    if outputs and len(outputs) < len(apart):
        return _axes_of_sides([i for i in apart if i not in outputs], outputs, family)
    heads = [i for i in apart if _HEAD_AXIS.fullmatch(lower[i])]
    others = [i for i in apart if i not in heads]
    if len(apart) == 2:
        heads, others = apart[:1], apart[1:]
    if not (heads and others):
        vector = "vector" if len(axes) == 1 else "a vector per layer"
        return vector if len(apart) <= 1 or heads else None
    first, second = sorted((heads, others))
    rows, columns = (second, first) if p.output_first else (first, second)
    return _axes_of_sides(rows, columns, family)


def _axes_of_sides(rows: list[int], columns: list[int], family: str) -> MatrixAxes | str:
    """The axes, from the places of inputs and outputs."""
    if not (rows and columns):
        return f"no inputs or no outputs ({family})"
    sides = merged(tuple(rows)), merged(tuple(columns))
    return MatrixAxes(*sides, said_by=f"axes of the family {family}")
