r"""Orthogonal matrices as products of Householder reflectors, and products with them.

$$U = H_1 H_2 \cdots H_d\, S, \qquad H_k = I - 2\,\frac{v_k v_k^\top}{v_k^\top v_k}, \qquad
S = \mathrm{diag}(\pm 1)$$

with $v_k$ zero above its $k$-th entry: the strictly lower triangle of $V = (v_1 \dots v_d)$ has as
many numbers as an orthogonal matrix has degrees of freedom. Any $V$ without a zero column gives a
matrix that is orthogonal up to rounding, so an error of $V$ turns the basis and does not distort
it. Each column may have any length; here $\|v_k\|^2 = 2$.

*Products.* A panel of $b$ consecutive reflectors is $I - V_p T_p V_p^\top$ with $T_p^{-1} = I +
\mathrm{striu}(V_p^\top V_p)$ (Schreiber and Van Loan, 1989; Puglisi, 1992): three products with a
panel instead of $b$ reflections. $T_p$ is found by inverting blocks of doubling size. Loops over
panels keep programs small at any order. Panels are zero above their first row; above order 256
they are grouped in `SEGMENTS` loops that leave out the rows above.

*Cost* of $U X$ for `X (d, n)`: about `2.5 d²n + 4 d n b` FLOPs (`4 d²n` up to order 256) in place
of the `2 d²n` of a product with $U$, and `24 d b² + 2 d² b` for the $T_p$, with `b = 64`. Beside
`X` and `V`, a panel is in memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ._numerics import HIGHEST

PANEL = 64
"""Reflectors that are applied together."""

SEGMENTS = 4
"""Loops over panels, if each has at least two. More save up to a fifth of the FLOPs and make
programs longer."""


@functools.partial(jax.jit, static_argnames=("inverse", "precision"))  # shared by programs' parts
def reflected(
    v: jax.Array,
    x: jax.Array,
    *,
    inverse: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`H_1 ⋯ H_k x`, or `H_k ⋯ H_1 x`, for `v (..., d, k)` and `x (..., d, n)`.

    `v` is zero above its diagonal.
    """
    panels = _panels(v)
    triangles = triangle_of(jnp.matmul(panels.mT, panels, precision=HIGHEST))
    number = panels.shape[-3]
    share = -(-number // SEGMENTS) if number > SEGMENTS else number
    starts = range(0, number, share)
    for start in starts if inverse else reversed(starts):
        row = start * PANEL
        rounds = min(share, number - start)

        def body(j: jax.Array, rest: jax.Array, start: int = start, rounds: int = rounds):
            panel = start + (j if inverse else rounds - 1 - j)
            own = jax.lax.dynamic_index_in_dim(panels, panel, -3, keepdims=False)
            t = jax.lax.dynamic_index_in_dim(triangles, panel, -3, keepdims=False)
            own = own[..., start * PANEL :, :]
            found = jnp.matmul(own.mT, rest, precision=precision)
            found = jnp.matmul(t.mT if inverse else t, found, precision=HIGHEST)
            return rest - jnp.matmul(own, found, precision=precision)

        rest = jax.lax.fori_loop(0, rounds, body, x[..., row:, :])
        x = jnp.concatenate([x[..., :row, :], rest], axis=-2)
    return x


def _panels(v: jax.Array) -> jax.Array:
    """The columns of `v (..., d, k)`, of squared length 2, in panels `(..., ⌈k/b⌉, d, b)`."""
    order = v.shape[-1]
    v = v * jax.lax.rsqrt(jnp.sum(v * v, axis=-2, keepdims=True) / 2)
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -order % PANEL)])
    return jnp.moveaxis(v.reshape(*v.shape[:-1], -1, PANEL), -2, -3)


def triangle_of(gram: jax.Array) -> jax.Array:
    """`T_p`, the inverse of `I + striu(VᵀV)`, for `gram = VᵀV (..., b, b)` of a panel."""
    i = jnp.arange(PANEL)

    def doubled(level: jax.Array, inverse: jax.Array) -> jax.Array:
        """From the inverses of the blocks of width `2^level` to those of twice the width."""
        block = i >> level
        pair = block >> 1
        beside = (pair[:, None] == pair[None]) & (block[:, None] < block[None])
        product = jnp.matmul(jnp.where(beside, gram, 0), inverse, precision=HIGHEST)
        return inverse - jnp.matmul(inverse, product, precision=HIGHEST)

    eye = jnp.broadcast_to(jnp.eye(PANEL, dtype=gram.dtype), gram.shape)
    return jax.lax.fori_loop(0, PANEL.bit_length() - 1, doubled, eye)
