"""Which parameter maps features to the output: by its name and place, never by its shape alone."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .._arrays import check_array
from ._names import HEAD, POSITION_WORDS, as_read, has, layer_place, path_of, scopes
from ._parameters import Parameter, Parameters
from ._readings import ends_of


def find_output_layer(leaves: Mapping[str, Any]) -> frozenset[str]:
    """Finds the paths of kernels that map features to the output.

    A kernel with two axes qualifies

    - by name, if its layer is called `lm_head`, `head`, `logits`, `unembed`, `readout`,
      `classifier` or the like, outside of attention, or is alone in a module called so;
    - by place, if its features and outputs `(D, V)` are those of a table of tokens `(V, D)` in the
      same module, and no other kernel has this shape. A table of positions does not count.

    Kernels that qualify by both are returned; else those by name; else those by place.
    """
    for path, leaf in leaves.items():
        check_array(path, leaf)
    read = as_read({path: tuple(leaf.shape) for path, leaf in leaves.items()})
    tree = Parameters({read[path]: tuple(leaf.shape) for path, leaf in leaves.items()})
    kernels = [p for p in tree.each.values() if p.ndim == 2 and p.is_named]
    by_name, by_place = _by_name([p.name for p in kernels]), _by_place(kernels, tree)
    chosen = by_name & by_place or by_name or by_place
    return frozenset(path for path, name in read.items() if name in chosen)


def _by_name(kernels: list[str]) -> set[str]:
    inside = Counter(module for name in kernels for module in scopes(name)[:-1])

    def is_head(name: str) -> bool:
        alone = [module.split("/")[-2] for module in scopes(name)[:-1] if inside[module] == 1]
        of_attention = re.search(r"(attention|attn).*/.*/", name.lower())  # heads of its own
        return not of_attention and any(map(HEAD.fullmatch, (layer_place(name).layer, *alone)))

    return set(filter(is_head, kernels))


def _by_place(kernels: list[Parameter], tree: Parameters) -> set[str]:
    # Features and outputs.
    ends = {p: tuple(p.shape[axis] for axis in ends_of(p)) for p in kernels}
    common = Counter(ends.values())
    tables = {
        (module, p.shape[::-1])
        for p in tree.each.values()
        if p.ndim == 2 and p.reason == "embedding"
        # A table of positions or types is not one of tokens.
        if not any(has(POSITION_WORDS, part) for part in path_of(p.name)[1:])
        for module in scopes(p.name)[:2]  # with and without a layer of its own
    }
    return {
        p.name
        for p, shape in ends.items()
        if (p.place.scope, shape) in tables and common[shape] == 1
    }
