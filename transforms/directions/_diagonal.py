r"""One-sided diagonal preconditioning: divides rows or columns by the root of their mean square.

$$v \leftarrow b_2 v + (1-b_2)\,\mathrm{diag}(G G^\top), \qquad
D = \mathrm{diag}(v + \epsilon)^{-1/2} M$$

for the momentum $M$ of $G$; on the right side $v$ averages $\mathrm{diag}(G^\top G)$ and divides
columns (An et al., arXiv:2503.20762, Algorithm 3).

*Numerics.* float32 at least. With `eps = 0`, a row that has always been zero gives zero. *Cost*:
two passes over the gradient. *State*: `m` numbers, or `n`, besides the momentum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._side import Side
from .._stacks import check_directions, each_array
from .._validate import checked


class DiagonalState(NamedTuple):
    diagonal: jax.Array  # v, float32 at least (..., m), or (..., n) on the right
    momentum: Any  # state of the transformation that gives M

    second_moments = ("diagonal",)


@checked
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
    divided = Side(side)
    average: Any = optax.identity() if momentum is None else momentum

    def init(p: Any) -> DiagonalState:
        zeros = jnp.zeros((*p.shape[:-2], divided.order(p)), np.promote_types(p.dtype, np.float32))
        state = average.init(p)
        check_directions("precondition_diagonal, for its momentum", average, p, state, p)
        return DiagonalState(zeros, state)

    def update(g: Any, state: Any, params: Any = None):
        m, momentum_state = average.update(g, state.momentum, params)  # Alg. 3, line 6
        work = g.astype(state.diagonal.dtype)
        v = b2 * state.diagonal + (1 - b2) * jnp.sum(work * work, axis=divided.other_axis)  # line 7
        damped = v + eps
        scale = jnp.where(damped > 0, jax.lax.rsqrt(jnp.where(damped > 0, damped, 1)), 0)
        scale = jnp.where(jnp.isfinite(damped), scale, jnp.nan)  # so that the guard sees it
        direction = m.astype(scale.dtype) * jnp.expand_dims(scale, divided.other_axis)  # line 8
        return direction.astype(m.dtype), DiagonalState(v, momentum_state)

    return each_array("precondition_diagonal", init, update, work=None)
