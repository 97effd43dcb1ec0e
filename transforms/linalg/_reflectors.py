r"""Orthogonal matrices as products of Householder reflectors, and products with them.

$$U = H_1 H_2 \cdots H_d\, S, \qquad H_k = I - 2\,\frac{v_k v_k^\top}{v_k^\top v_k}, \qquad
S = \mathrm{diag}(\pm 1)$$

with $v_k$ zero above its $k$-th entry: the strictly lower triangle of $V = (v_1 \dots v_d)$ has as
many numbers as an orthogonal matrix has degrees of freedom. Any $V$ without a zero column gives a
matrix that is orthogonal up to rounding, so an error of $V$ turns the basis and does not distort
it. Each column may have any length.

*Products.* A panel of $b$ consecutive reflectors is $I - V_p T_p V_p^\top$, where $T_p^{-1}$ is the
upper triangle of $V_p^\top V_p$ with half its diagonal (Schreiber and Van Loan, 1989; Puglisi,
1992): with $W_p = V_p T_p$, two products with a panel instead of $b$ reflections. Loops over panels
keep programs small at any order. Panels are zero above their first row; from order 512 on they are
grouped in two to four loops that leave out the rows above.

*Cost* of $U X$ for `X (d, n)`, in place of the `2 d²n` FLOPs of a product with $U$: `4 d²n` up to
order 511, `3 d²n` at 512, `2.5 d²n` from 1024 on, and `5 d² b` for all $W_p$, with `b = 64`. Beside
`X`, the panels $V_p$ and $W_p$ are in memory, `2 d²`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ._cholesky import inverse_of_lower
from ._numerics import HIGHEST

PANEL = 64
"""Reflectors that are applied together."""

MOST_LOOPS, LEAST_PANELS = 4, 4
"""Loops over panels at most, and panels of a loop at least. More loops save FLOPs and make programs
longer."""


@functools.partial(jax.jit, static_argnames=("inverse", "precision"))  # shared by programs' parts
def reflected(
    v: jax.Array,
    x: jax.Array,
    *,
    inverse: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`H_1 ⋯ H_k x`, or `H_k ⋯ H_1 x`, for lower triangular `v (..., d, k)` and `x (..., d, n)`."""
    rows, products = _panels(v)
    first, second = (products, rows) if inverse else (rows, products)
    number = rows.shape[-3]
    share = -(-number // max(1, min(MOST_LOOPS, number // LEAST_PANELS)))
    starts = range(0, number, share)
    for start in starts if inverse else reversed(starts):
        row = start * PANEL
        rounds = min(share, number - start)

        def body(j: jax.Array, rest: jax.Array, start: int = start, rounds: int = rounds):
            panel = start + (j if inverse else rounds - 1 - j)
            a, b = (
                jax.lax.dynamic_index_in_dim(x, panel, -3, keepdims=False)[..., start * PANEL :]
                for x in (first, second)
            )
            found = jnp.matmul(a, rest, precision=precision)
            return rest - jnp.matmul(b.mT, found, precision=precision)

        rest = jax.lax.fori_loop(0, rounds, body, x[..., row:, :])
        x = jnp.concatenate([x[..., :row, :], rest], axis=-2) if row else rest
    return x


def _panels(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`V_pᵀ` and `W_pᵀ` of all panels of `v (..., d, k)`, both `(..., ⌈k/b⌉, b, d)`."""
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -v.shape[-1] % PANEL)])
    rows = v.mT.reshape(*v.shape[:-2], -1, PANEL, v.shape[-2])
    gram = jnp.matmul(rows, rows.mT, precision=HIGHEST)
    return rows, jnp.matmul(triangle_of(gram).mT, rows, precision=HIGHEST)


def triangle_of(gram: jax.Array) -> jax.Array:
    """`T_p (..., b, b)` of panels with `gram = V_pᵀ V_p`."""
    i, j = jnp.mgrid[:PANEL, :PANEL]
    # A column of zeros, such as those that fill the last panel, reflects nothing.
    lower = jnp.where(i > j, gram, jnp.where(i < j, 0, jnp.where(gram > 0, gram / 2, 1)))
    return inverse_of_lower(lower).mT
