"""Starting the state of a matrix anew if it is damaged.

A value in a state that is not finite, as from a damaged checkpoint, never leaves a moment, basis
or root by itself. It shows in the direction, which is then not finite although the gradient is; so
directions are checked, not states. The update of such a matrix is zero, and at the beginning of the
next step its part of the state becomes what `init` gives. The guard (`_guard.py`) and `in_subspace`
do this. A statistic does not show in the direction: a refresh that finds it damaged starts it anew.

Two kinds of entries go on: integers of 32 bits (step counts, random keys), and `Counts`, see
`Counts.restarted`. The arrays of a matrix are found as those of a stack are for a mesh: by the key
of its leaf among the keys of their path.

*Cost.* A step without damage runs a loop of no rounds, on the state that it was given. (A loop
behind the step would keep all directions alive, or copy the moments that they read. If the state is
not donated, XLA copies it for the loop.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._counts import Counts
from ._trees import where_entries
from .refresh._visits import at_most_once


def restarted(init: Callable[[Any], Any], damaged: Any, state: Any, like: Any) -> Any:
    """`state`, as `init` gives it for damaged matrices.

    Args:
      init: `init` of the transformation.
      damaged: per leaf of `like` which of its matrices are damaged, bool `(...)`.
      state: the transformation's state.
      like: matrices `(..., m, n)`, of whose shapes and dtypes `state` is.
    """
    flags = jax.tree_util.tree_leaves_with_path(damaged)
    if not flags:
        return state

    def anew(flags: list[jax.Array], state: Any) -> Any:
        fresh = init(jax.tree.map(jnp.zeros_like, like))

        def chosen(path: Any, old: Any, new: Any) -> Any:
            owner = _owner(path, places)
            if owner is None:  # a step count of Optax's, negative in a damaged checkpoint
                return jnp.maximum(old, 0) if old.dtype == jnp.int32 else old
            if isinstance(old, Counts):
                return where_entries(flags[owner], old.restarted(), old)
            own = old.shape[: flags[owner].ndim] == flags[owner].shape
            if old.dtype in KEPT or not own:
                return old
            return where_entries(flags[owner], new.astype(old.dtype), old)

        return jax.tree_util.tree_map_with_path(chosen, state, fresh, is_leaf=_is_counts)

    places = {path: i for i, (path, _) in enumerate(flags)}
    found = jnp.stack([jnp.any(which) for _, which in flags]).any()
    return at_most_once(anew, found, [which for _, which in flags], state)


KEPT = (jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32))


def flagged(counts: Any) -> Any:
    """Which matrices the last step has found damaged, from a tree of `Counts`."""
    return jax.tree.map(lambda n: n.of("damaged") > 0, counts, is_leaf=_is_counts)


def _is_counts(node: Any) -> bool:
    return isinstance(node, Counts)


def _owner(path: tuple[Any, ...], places: dict[tuple[Any, ...], int]) -> int | None:
    """The number of the place that is the longest part of a path."""
    for length in range(max(map(len, places)), -1, -1):
        for start in range(len(path) - length + 1):
            if path[start : start + length] in places:
                return places[path[start : start + length]]
    return None
