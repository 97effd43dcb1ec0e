"""The shapes of parameters that a transformation does not see, because others treat them.

What a kernel is can depend on its bias, which goes to AdamW: inside of the routing there is a hole
in its place. So the routing declares the shapes of the whole tree, and the rule looks them up for
the holes of the tree that it gets.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from .._paths import NamedLeaves, is_hole, named_leaves
from ._names import Shapes

_whole: contextvars.ContextVar[Shapes] = contextvars.ContextVar("whole", default={})  # noqa: B039


@contextlib.contextmanager
def inside_of(tree: Any) -> Iterator[None]:
    """Declares that the code inside works on parts of `tree`."""
    token = _whole.set({**_whole.get(), **_own(named_leaves(tree))})
    try:
        yield
    finally:
        _whole.reset(token)


def shapes_around(named: NamedLeaves) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree's leaves and, where they are declared, of what its holes stand for."""
    whole = _whole.get()
    return {name: whole[name] for name in named.names if name in whole} | _own(named)


def _own(named: NamedLeaves) -> dict[str, tuple[int, ...]]:
    return {name: tuple(jnp.shape(leaf)) for name, leaf in named.present().items()}


def remembered(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f(tree)`, computed once for trees of the same paths, shapes and dtypes, among equal others.

    `init` and every `update` ask the rule about the same parameters.
    """
    known: dict[Any, Any] = {}

    def of(tree: Any) -> Any:
        named = named_leaves(tree)
        dtypes = tuple(None if is_hole(x) else jnp.result_type(x) for x in named.leaves)
        key = named.treedef, dtypes, tuple(shapes_around(named).items())
        if key not in known:
            known[key] = f(tree)
        return known[key]

    return of
