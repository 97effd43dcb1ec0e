"""Which parameter maps features to the output: by its name and place, never by its shape alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .._validate import check_array
from ._names import (
    Shapes,
    as_read,
    is_attention_scope,
    is_head_name,
    is_named_matrix,
    is_token_table,
    layer_place,
    scopes,
)
from ._readings import ends_of


def find_output_layer(leaves: Mapping[str, Any]) -> frozenset[str]:
    """Finds the paths of kernels that map features to the output.

    A kernel with two axes qualifies

    - by name, if its layer is called `lm_head`, `head`, `logits`, `unembed`, `readout`,
      `classifier` or the like, outside of attention, or if it is the only kernel of a module that
      is called so;
    - by place, if its features and outputs `(D, V)` are those of a table of tokens `(V, D)` in the
      same module, and no other kernel has this shape. A table of positions does not count.

    Kernels that qualify by both are returned; else those by name; else those by place.
    """
    for path, leaf in leaves.items():
        check_array(path, leaf)
    read = as_read({path: tuple(leaf.shape) for path, leaf in leaves.items()})
    shapes = {read[path]: tuple(leaf.shape) for path, leaf in leaves.items()}
    kernels = [n for n, shape in shapes.items() if len(shape) == 2 and is_named_matrix(n, shapes)]
    by_name, by_place = _by_name(kernels), _by_place(kernels, shapes)
    found = by_name & by_place or by_name or by_place
    return frozenset(path for path, name in read.items() if name in found)


def _by_name(kernels: list[str]) -> set[str]:
    inside = Counter(module for name in kernels for module in scopes(name)[:-1])

    def is_head(name: str) -> bool:
        alone = [module.split("/")[-2] for module in scopes(name)[:-1] if inside[module] == 1]
        return any(map(is_head_name, (layer_place(name).layer, *alone)))

    return {name for name in kernels if is_head(name) and not is_attention_scope(name)}


def _by_place(kernels: list[str], shapes: Shapes) -> set[str]:
    # Features and outputs.
    ends = {n: tuple(shapes[n][axis] for axis in ends_of(n, shapes)) for n in kernels}
    common = Counter(ends.values())
    tables = {
        (module, shape[::-1])
        for name, shape in shapes.items()
        if len(shape) == 2 and is_token_table(name, shapes)
        for module in scopes(name)[:2]  # with and without a layer of its own
    }
    return {
        name
        for name, shape in ends.items()
        if (layer_place(name).scope, shape) in tables and common[shape] == 1
    }
