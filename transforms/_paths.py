"""Parameter paths: the same spelling in every kind of tree.

A leaf's path joins its keys by "/": `block_0/attention/query/kernel`. It leaves out boxes that hold
one array, under `.value` (NNX variables, Linen's `Partitioned`) or without a key (Haliax'
`NamedArray`, Simply's `AnnotatedArray`), so a pattern written for Linen also matches NNX in any
form. A box that has a label has it as its path (penzai's `ParameterValue`).

A kernel's treatment can depend on its bias, which goes to AdamW: inside the routing it is a hole.
So the routing declares the shapes of the whole tree (`inside_of`), and the rule looks them up for
the holes of the tree that it gets (`shapes_around`).
"""

import contextlib
import contextvars
import fnmatch
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import FlattenedIndexKey, GetAttrKey, keystr

from ._recording import holding

_shapes: contextvars.ContextVar[Mapping[str, tuple[int, ...]]] = contextvars.ContextVar(
    "whole",
    default={},  # noqa: B039
)


class NamedLeaves(NamedTuple):
    """A flattened tree: `leaves[i]` has the path `names[i]`; missing leaves stay as holes."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any

    def present(self) -> dict[str, Any]:
        """The leaves that are not holes, by path."""
        return {n: x for n, x in zip(self.names, self.leaves, strict=True) if not is_hole(x)}

    def rebuild(self, by_name: dict[str, Any]) -> Any:
        """The same tree with leaves from `by_name`; holes stay holes."""
        pairs = zip(self.names, self.leaves, strict=True)
        return self.treedef.unflatten([x if is_hole(x) else by_name[n] for n, x in pairs])


def is_hole(leaf: Any) -> bool:
    """Whether `leaf` marks a missing parameter (`None`, or masked by Optax)."""
    return leaf is None or isinstance(leaf, optax.MaskedNode)


def is_box(node: Any) -> bool:
    """Whether `node` is one of Flax's boxes that say how an array is sharded."""
    return hasattr(node, "get_partition_spec") and hasattr(node, "replace_boxed")


def named_leaves(tree: Any) -> NamedLeaves:
    """Flattens `tree` into leaves with paths."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_hole)
    names = path_names([path for path, _ in with_path])
    if any(GetAttrKey("value") in path for path, _ in with_path):
        names = _labeled(tree, names)
    for twice, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two parameters have the same path {twice!r}; rename one of them.")
    return NamedLeaves(names, tuple(leaf for _, leaf in with_path), treedef)


def _labeled(tree: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names of the leaves, with the labels of boxes in the place of their paths."""
    left, labeled = iter(names), []
    tells = lambda x: is_hole(x) or _label(x) is not None  # noqa: E731
    for node in jax.tree.leaves(tree, is_leaf=tells):
        leaf_names = list(itertools.islice(left, len(jax.tree.leaves(node, is_leaf=is_hole))))
        label = _label(node)
        labeled += [label] if label is not None and len(leaf_names) == 1 else leaf_names
    return tuple(labeled)


def _label(node: Any) -> str | None:
    label = getattr(node, "label", None)
    return label if isinstance(label, str) and hasattr(node, "value") else None


def path_names(paths: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """The names of the leaves of a tree, from their paths in JAX's form."""
    # A box has an only child; a field called `value` among others keeps its name.
    nodes = {path[:i] for path in paths for i in range(1, len(path) + 1)}
    children = Counter(node[:-1] for node in nodes)
    boxes = {n for n in nodes if children[n[:-1]] == 1 and isinstance(n[-1], FlattenedIndexKey)}
    values = {n for n in nodes if children[n[:-1]] == 1 and n[-1] == GetAttrKey("value")}
    names = []
    for path in paths:
        while len(path) > 1 and (path in boxes or path in values):
            path = path[:-1]
        kept = [key for i, key in enumerate(path, 1) if path[:i] not in boxes]
        names.append(place_of(tuple(kept)))
    return tuple(names)


def place_of(path: tuple[Any, ...]) -> str:
    """The spelling of a path of JAX as it is, boxes included."""
    return keystr(path, simple=True, separator="/")


def matches(name: str, pattern: str) -> bool:
    """Whether a glob pattern matches the path or a node above it (`*` also matches "/")."""
    # A path may have brackets, which are sets of characters in a pattern.
    if name == pattern or name.startswith(f"{pattern}/"):
        return True
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}/*")


def check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Requires every pattern to match at least one path."""
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no parameter; the paths are "
                f"{first_of(names)}."
                + (" In a pattern, [...] is a set of characters." if "[" in pattern else "")
            )


def first_of(names: Iterable[str]) -> str:
    """Eight paths at most, for an error."""
    first = [*itertools.islice(names, 9)]
    return ", ".join([*first[:8], "..."] if len(first) > 8 else first)


def is_placeholder(params: Any) -> bool:
    """Whether `params` is the leafless placeholder that `optax.tree.map_params` gives `init`."""
    return not jax.tree.leaves(params) and type(params).__name__ == "_ParamsPlaceholder"


def inside_of(tree: Any) -> contextlib.AbstractContextManager[None]:
    """Declares that the code inside works on parts of `tree`."""
    return holding(_shapes, shapes_around(named_leaves(tree)))


def shapes_around(named: NamedLeaves) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves of a tree and, where they are declared, of its holes."""
    whole = _shapes.get()
    known = {name: whole[name] for name in named.names if name in whole}
    return known | {name: tuple(jnp.shape(x)) for name, x in named.present().items()}


def remembered(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f(tree)`, computed once for trees of one structure, shapes, dtypes and surroundings."""
    # `init` and every `update` ask the rule about the same parameters.
    known: dict[Any, Any] = {}

    def value_of(tree: Any) -> Any:
        named = named_leaves(tree)
        dtypes = tuple(None if is_hole(x) else jnp.result_type(x) for x in named.leaves)
        key = named.treedef, dtypes, tuple(shapes_around(named).items())
        if key not in known:
            known[key] = f(tree)
        return known[key]

    return value_of
