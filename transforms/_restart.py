"""Starting the state of a matrix anew if it is damaged.

A value in a state that is not finite, as from a damaged checkpoint, never leaves a moment, basis
or root by itself. It shows in the direction, which is then not finite although the gradient is; so
directions are checked, not states. The update of such a matrix is zero, and at the beginning of the
next step its part of the state becomes what `init` gives. The guard (`_guard.py`) and `in_subspace`
do this. A statistic does not show in the direction: a refresh that finds it damaged starts it anew.

Two kinds of entries go on: integers of 32 bits (step counts, random keys), and `Counts`, see
`Counts.restarted`. An array of the state belongs to the matrices if it starts with their axes.

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
from .linalg._loops import at_most_once


def restarted(init: Callable[[Any], Any], damaged: jax.Array, state: Any, like: jax.Array) -> Any:
    """`state`, as `init` gives it for damaged matrices.

    Args:
      init: `init` of the transformation.
      damaged: which matrices are damaged, bool `(...)`.
      state: the transformation's state.
      like: matrices `(..., m, n)`, of whose shape and dtype `state` is.
    """

    def anew(damaged: jax.Array, state: Any) -> Any:
        def chosen(old: Any, new: Any) -> Any:
            if isinstance(old, Counts):
                return where_entries(damaged, old.restarted(), old)
            if old.ndim == 0 and old.dtype == jnp.int32:
                return jnp.maximum(old, 0)  # a step count of Optax's in a damaged checkpoint
            if old.dtype in KEPT or old.shape[: damaged.ndim] != damaged.shape:
                return old
            return where_entries(damaged, new.astype(old.dtype), old)

        return jax.tree.map(chosen, state, init(jnp.zeros_like(like)), is_leaf=_is_counts)

    return at_most_once(anew, jnp.any(damaged), damaged, state)


KEPT = (jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32))


def flagged(counts: Counts) -> jax.Array:
    """Which matrices the last step has found damaged, bool `(...)`."""
    return counts.of("damaged") > 0


def _is_counts(node: Any) -> bool:
    return isinstance(node, Counts)
