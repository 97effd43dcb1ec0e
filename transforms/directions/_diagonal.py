r"""One-sided diagonal preconditioning: divides columns by the root of their mean square.

$$v \leftarrow b_2 v + (1-b_2)\,\mathrm{diag}(G^\top G), \qquad
D = M\,\mathrm{diag}(v + \epsilon)^{-1/2}$$

for the momentum $M$ of $G$ (An et al., arXiv:2503.20762, Algorithm 3). It always preconditions the
right side.

*Numerics.* float32 at least. With `eps = 0`, a column that has always been zero gives zero. *Cost*:
two passes over the gradient. *State*: `n` numbers besides the momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._stacks import check_directions
from .._trees import map_unzip
from .._validate import check_decay, check_interval, check_matrices


class ColumnState(NamedTuple):
    """State of `precondition_columns`."""

    columns: Any  # v, float32 at least (..., n)
    momentum: Any  # state of the transformation that gives M

    second_moments = ("columns",)


def precondition_columns(
    momentum: optax.GradientTransformation | None = None,
    *,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
) -> optax.GradientTransformation:
    """Divides each column by the root of the running mean of its squared gradient norm.

    Args:
      momentum: a transformation that makes `M` from the gradient; `None` means `M = G`.
      b2: decay rate of the mean, which starts at 0 and is not bias-corrected.
      eps: damping, added inside the root.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if `b2` is outside [0, 1), if `eps` is negative, or if a leaf is not a matrix.
    """
    check_decay("b2", b2)
    check_interval("eps", eps, 0.0)
    average = optax.identity() if momentum is None else momentum

    def init(params: Any) -> ColumnState:
        check_matrices(params, "precondition_columns")

        def zeros(p: jax.Array) -> jax.Array:
            dtype = jnp.promote_types(p.dtype, jnp.float32)
            return jnp.zeros(p.shape[:-2] + p.shape[-1:], dtype)

        own = average.init(params)
        check_directions("precondition_columns, for its momentum", average, params, own, params)
        return ColumnState(jax.tree.map(zeros, params), own)

    def update(updates: Any, state: Any, params: Any = None):
        matrices, momentum_state = average.update(updates, state.momentum, params)

        def scaled(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[Any, Any]:
            work = g.astype(v.dtype)
            mean = b2 * v + (1 - b2) * jnp.sum(work * work, axis=-2)
            damped = mean + eps
            scale = jnp.where(damped > 0, jax.lax.rsqrt(jnp.where(damped > 0, damped, 1)), 0)
            scale = jnp.where(jnp.isfinite(damped), scale, jnp.nan)  # so that the guard sees it
            return (m * scale[..., None, :]).astype(m.dtype), mean

        directions, columns = map_unzip(2, scaled, updates, matrices, state.columns)
        return directions, ColumnState(columns, momentum_state)

    return optax.GradientTransformation(init, update)
