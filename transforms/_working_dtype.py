"""Running a chain in float32 although the gradients are narrower."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ._trees import widened
from ._validate import check_matrices


def in_float32(inner: optax.GradientTransformation, method: str) -> optax.GradientTransformation:
    """Runs `inner` in float32 at least, and rounds to the gradients' dtypes at the end alone.

    Between the parts of a chain, updates have the gradients' dtype. Where one part leaves something
    that has to be exact for the next (a rank, a mean of 0), that is too coarse.
    """

    def init(params: Any) -> Any:
        check_matrices(params, method)
        return inner.init(widened(params))

    def update(updates: Any, state: Any, params: Any = None):
        wide = None if params is None else widened(params)
        directions, state = inner.update(widened(updates), state, wide)
        return jax.tree.map(lambda d, g: d.astype(g.dtype), directions, updates), state

    return optax.GradientTransformation(init, update)
