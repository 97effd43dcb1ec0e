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
keep programs small at any order. Panels are zero above their first row; from order 512 on, or 256
to form $U$, they are grouped in two to four loops that leave out the rows above.

*Cost.* `4 d² b` FLOPs for all $W_p$, with `b = 64`; `panels_of` makes them once for all products.
In place of the `2 d²n` FLOPs of a product with $U$, `reflected` takes `4 d²n` up to order 511,
`3 d²n` at 512 and `2.5 d²n` from 1024 on, in products that are too thin for a processor's full
speed. `formed` makes $U$ in `4 d³` FLOPs up to order 255, `2.5 d³` at 256 and `1.9 d³` from 512 on;
`4 d³ / 3` are needed. So it pays to form $U$ for two products or more with at least `d` columns.
Beside `X`, the panels $V_p$ and $W_p$ are in memory, `2 d²`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._cholesky import inverse_of_lower
from ._numerics import HIGHEST
from ._platforms import zeros_beside
from ._products import multiplied

PANEL = 64
"""Reflectors that are applied together."""

MOST_LOOPS, LEAST_PANELS, LEAST_FORMED = 4, 4, 2
"""Loops over panels at most, and panels of a loop at least, for products and to form a matrix. More
loops save FLOPs and make programs longer."""


class Panels(NamedTuple):
    """A batch of products of reflectors `H_1 ⋯ H_k` of order `d`, in panels of `b`."""

    rows: jax.Array  # V_pᵀ, (..., ⌈k/b⌉, b, d)
    products: jax.Array  # W_pᵀ, of the same shape

    def loops(self, least: int) -> list[tuple[int, int]]:
        """The first panels of the loops, and the numbers of their panels, which are `least`."""
        number = self.rows.shape[-3]
        share = -(-number // max(1, min(MOST_LOOPS, number // least)))
        return [(start, min(share, number - start)) for start in range(0, number, share)]


@jax.jit  # shared by a program's parts
def panels_of(v: jax.Array) -> Panels:
    """The panels of lower triangular `v (..., d, k)`."""
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -v.shape[-1] % PANEL)])
    rows = v.mT.reshape(*v.shape[:-2], -1, PANEL, v.shape[-2])
    gram = jnp.matmul(rows, rows.mT, precision=HIGHEST)
    return Panels(rows, jnp.matmul(triangle_of(gram).mT, rows, precision=HIGHEST))


@functools.partial(jax.jit, static_argnames=("inverse", "precision"))
def reflected(
    panels: Panels,
    x: jax.Array,
    *,
    inverse: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`H_1 ⋯ H_k x`, or `H_k ⋯ H_1 x`, for `x (..., d, n)`."""
    loops = panels.loops(LEAST_PANELS)
    for start, number in loops if inverse else reversed(loops):
        row = start * PANEL
        rest = _apply_panels(panels, start, number, x[..., row:, :], inverse, precision)
        x = jnp.concatenate([x[..., :row, :], rest], axis=-2) if row else rest
    return x


@functools.partial(jax.jit, static_argnames=("precision",))
def formed(panels: Panels, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """`H_1 ⋯ H_k (..., d, d)`."""
    rows, found = panels.rows[..., 0, :, :], None
    for start, number in reversed(panels.loops(LEAST_FORMED)):
        # The reflectors of this loop change nothing before their rows, in rows or columns.
        new = panels.rows.shape[-1] - start * PANEL if found is None else number * PANEL
        zeros = zeros_beside(rows, (*rows.shape[:-2], new, new))
        corner = zeros + jnp.broadcast_to(jnp.eye(new, dtype=rows.dtype), zeros.shape)
        found = corner if found is None else _merged(corner, found)
        found = _apply_panels(panels, start, number, found, False, precision)
    assert found is not None
    return found


def _merged(a: jax.Array, b: jax.Array) -> jax.Array:
    """The block diagonal matrices of `a (..., m, m)` and `b (..., n, n)`."""
    edge = [(0, 0)] * (a.ndim - 2)
    m, n = a.shape[-1], b.shape[-1]
    return jnp.pad(a, [*edge, (0, n), (0, n)]) + jnp.pad(b, [*edge, (m, 0), (m, 0)])


def _apply_panels(
    panels: Panels,
    start: int,
    number: int,
    x: jax.Array,
    inverse: bool,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Applies so many panels to the rows `x` from the first one's on."""
    first, second = reversed(panels) if inverse else panels

    def body(j: jax.Array, x: jax.Array) -> jax.Array:
        panel = start + (j if inverse else number - 1 - j)
        a, b = (
            jax.lax.dynamic_index_in_dim(y, panel, -3, keepdims=False)[..., start * PANEL :]
            for y in (first, second)
        )
        inner = multiplied(a, x, precision)
        return x - multiplied(b.mT, inner, precision)

    return jax.lax.fori_loop(0, number, body, x)


def triangle_of(gram: jax.Array) -> jax.Array:
    """`T_p (..., b, b)` of panels with `gram = V_pᵀ V_p`."""
    i, j = jnp.mgrid[:PANEL, :PANEL]
    # A column of zeros, such as those that fill the last panel, reflects nothing.
    lower = jnp.where(i > j, gram, jnp.where(i < j, 0, jnp.where(gram > 0, gram / 2, 1)))
    return inverse_of_lower(lower).mT
