r"""One-sided diagonal preconditioning: divides rows or columns by the root of their mean square.

$$v \leftarrow b_2 v + (1-b_2)\,\mathrm{diag}(G G^\top), \qquad
D = \mathrm{diag}(v + \epsilon)^{-1/2} M$$

for the momentum $M$ of $G$; on the right side $v$ averages $\mathrm{diag}(G^\top G)$ and divides
columns (An et al., arXiv:2503.20762, Algorithm 3).

*Numerics.* float32 at least. With `eps = 0`, a row that has always been zero gives zero. *Cost*:
two passes over the gradient. *State*: `m` numbers, or `n`, besides the momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._side import Side
from .._stacks import check_directions
from .._trees import map_unzip
from .._validate import check_choice, check_decay, check_interval, check_matrices


class DiagonalState(NamedTuple):
    """State of `precondition_diagonal`."""

    diagonal: Any  # v, float32 at least (..., m), or (..., n) on the right
    momentum: Any  # state of the transformation that gives M

    second_moments = ("diagonal",)


def precondition_diagonal(
    momentum: optax.GradientTransformation | None = None,
    *,
    side: str = "left",
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
) -> optax.GradientTransformation:
    """Divides rows or columns by the root of the running mean of their squared gradient norms.

    Args:
      momentum: a transformation that makes `M` from the gradient; `None` means `M = G`.
      side: "left" divides rows, "right" columns.
      b2: decay rate of the mean, which starts at 0 and is not bias-corrected.
      eps: damping, added inside the root.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if `side` is unknown, if `b2` is outside [0, 1), if `eps` is negative, or if a
        leaf is not a matrix.
    """
    check_choice("side", side, ("left", "right"))
    check_decay("b2", b2)
    check_interval("eps", eps, 0.0)
    own = Side(side)
    average = optax.identity() if momentum is None else momentum

    def init(params: Any) -> DiagonalState:
        check_matrices(params, "precondition_diagonal")

        def zeros(p: jax.Array) -> jax.Array:
            dtype = np.promote_types(p.dtype, np.float32)
            return jnp.zeros((*p.shape[:-2], own.order(p)), dtype)

        state = average.init(params)
        check_directions("precondition_diagonal, for its momentum", average, params, state, params)
        return DiagonalState(jax.tree.map(zeros, params), state)

    def update(updates: Any, state: Any, params: Any = None):
        matrices, momentum_state = average.update(updates, state.momentum, params)

        def scaled(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[Any, Any]:
            work = g.astype(v.dtype)
            mean = b2 * v + (1 - b2) * jnp.sum(work * work, axis=own.other_axis)
            damped = mean + eps
            scale = jnp.where(damped > 0, jax.lax.rsqrt(jnp.where(damped > 0, damped, 1)), 0)
            scale = jnp.where(jnp.isfinite(damped), scale, jnp.nan)  # so that the guard sees it
            across = jnp.expand_dims(scale, own.other_axis)
            return (m.astype(scale.dtype) * across).astype(m.dtype), mean

        directions, diagonal = map_unzip(2, scaled, updates, matrices, state.diagonal)
        return directions, DiagonalState(diagonal, momentum_state)

    return optax.GradientTransformation(init, update)
