r"""Row and column scaling: the two diagonals of RACS.

$$s = \frac{(G^{\odot 2})^\top q}{\|q\|^2}, \qquad q = \frac{G^{\odot 2} s}{\|s\|^2} \qquad
\text{(a few rounds from } q = 1\text{)}$$
$$\bar s \leftarrow b_2\,\bar s + (1-b_2)\,s, \quad \bar q \leftarrow b_2\,\bar q + (1-b_2)\,q,
\quad D = \mathrm{diag}(\bar q)^{-1/2}\, G\, \mathrm{diag}(\bar s)^{-1/2}$$

Gong et al., arXiv:2502.07752, Eq. 16 and Algorithm 1, lines 5-8. The rounds are power iterations,
which converge to the principal singular pair of a positive $G^{\odot 2}$ (Proposition 3).

*Numerics.* float32 at least. Rows and columns that have always been zero give zero. If
$G^{\odot 2}$ decomposes into blocks, or nearly so, the fixed point vanishes outside one block, and
$D$ would be unbounded. Entries of $\bar q$ and $\bar s$ are therefore raised to at least
`eps(dtype)²` times the largest (the rounding noise of a squared gradient), so that
$|D_{ij}| \le |G_{ij}| / (\mathrm{eps}^2 \sqrt{\max \bar q\, \max \bar s})$. *Cost* per matrix:
`4mn` FLOPs per round, memory-bound. *State*: `m + n` numbers.

*Scale.* If $G^{\odot 2}$ has rank 1, all $|G_{ij}| / \sqrt{q_i s_j}$ are 1. Because of $\bar q \ge
(1-b_2)\,q$ and $\bar s \ge (1-b_2)\,s$, no entry of $D$ exceeds $1 / (1-b_2)$ then, and all have
this size at the first step. `racs` limits root mean squares to it; those of Gaussian gradients are
1.00 (order 128 and above) to 1.14 times this at the first step, and a tenth of it later.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._counts import next_step
from .._stacks import each_array
from .._validate import checked, concrete
from ..linalg._numerics import magnitude, power_of_two, ratio, shortened


class RowColumnState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    rows: jax.Array  # q̄ (..., m), float32 at least
    columns: jax.Array  # s̄ (..., n), float32 at least

    second_moments = ("rows", "columns")


def row_column_scales(squares: jax.Array, iterations: int = 5) -> tuple[jax.Array, jax.Array]:
    """Computes `q (..., m)` and `s (..., n)` of Eq. 16 for `squares = G² (..., m, n)`."""
    q = s = jnp.ones(squares.shape[:-1], squares.dtype)
    square = lambda x: jnp.sum(x * x, axis=-1, keepdims=True)  # noqa: E731
    for _ in range(iterations):
        s = ratio(jnp.einsum("...mn,...m->...n", squares, q), square(q))  # Eq. 16
        q = ratio(jnp.einsum("...mn,...n->...m", squares, s), square(s))
    return q, s


@checked
def scale_by_rows_and_columns(
    b2: jax.typing.ArrayLike = 0.9,
    *,
    iterations: int = 5,
    bias_correction: bool = False,
    limit: jax.typing.ArrayLike = float("inf"),
) -> optax.GradientTransformation:
    """Scales rows and columns by running averages of RACS's two diagonals.

    Args:
      b2: decay rate of the averages, which start at 0; `b2 = 0` uses only the current gradient.
      iterations: rounds of the fixed-point iteration.
      bias_correction: whether to divide the averages by `1 - b2ᵗ`. The paper does not, so its first
        direction is `1 / (1 - b2)` times longer.
      limit: the largest root mean square of a matrix's direction, over rows and columns that have
        had gradients; longer ones are shortened.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if `b2` is outside [0, 1), if `iterations < 1`, or if a leaf is not a matrix.
    """

    def init(p: Any) -> RowColumnState:
        (*batch, m, n), dtype = p.shape, np.promote_types(p.dtype, np.float32)
        rows, columns = jnp.zeros((*batch, m), dtype), jnp.zeros((*batch, n), dtype)
        return RowColumnState(jnp.zeros([], jnp.int32), rows, columns)

    def update(g: Any, state: Any, params: Any = None):
        count = next_step(state.count)
        weight = 1 - b2 ** count.astype(jnp.float32) if bias_correction else 1.0
        work = g.astype(state.rows.dtype)
        # Exact scaling by a power of two keeps the fourth powers below in range.
        exponent = power_of_two(jnp.max(jnp.abs(work), axis=(-2, -1)))
        near_one = work * jnp.ldexp(jnp.ones_like(work[..., :1, :1]), -exponent[..., None, None])
        q, s = row_column_scales(near_one * near_one, iterations)  # Alg. 1, line 5
        s = jnp.ldexp(s, 2 * exponent[..., None])
        rows = b2 * state.rows + (1 - b2) * q  # line 7
        columns = b2 * state.columns + (1 - b2) * s  # line 6
        left = _inverse_square_root(rows / weight)[..., :, None]  # line 8
        right = _inverse_square_root(columns / weight)[..., None, :]
        scaled = left * work * right
        if concrete(limit) != np.inf:
            # Rows and columns of zeros do not count: padding changes no block.
            size = jnp.sum(rows > 0, axis=-1) * jnp.sum(columns > 0, axis=-1)
            scaled = shortened(scaled, limit * jnp.sqrt(size.astype(rows.dtype)))
        return scaled.astype(g.dtype), RowColumnState(count, rows, columns)

    return each_array("scale_by_rows_and_columns", init, update, work=None)


def _inverse_square_root(x: Any) -> jax.Array:
    """`x^(-1/2)`, 0 where `x` is 0; NaN if an entry is not finite, so that the guard sees it."""
    largest = magnitude(x, -1, keepdims=True)
    noise = jnp.finfo(x.dtype).eps ** 2 * largest
    root = jnp.where(x > 0, jax.lax.rsqrt(jnp.where(x > 0, jnp.maximum(x, noise), 1)), 0)
    return jnp.where(jnp.isfinite(largest), root, jnp.nan)
