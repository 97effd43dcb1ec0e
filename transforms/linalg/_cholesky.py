r"""Cholesky decompositions, and inverses of small triangles.

*On TPUs* in a loop over panels of `WIDTH` columns: a panel of $L$ is that of $A - L L^\top$, with
the panels so far, divided by the Cholesky factor of its diagonal block. Tiles of zeros are left out
of the product. *Cost*: $n^3/3$ FLOPs in products, and more for tiles that the diagonal cuts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._numerics import HIGHEST
from ._platforms import by_platform, in_rows, zeros_beside

WIDTH = 128
"""Columns of a panel; XLA has blocks of the same width."""


def lower_factor(a: jax.Array) -> jax.Array:
    """The lower Cholesky factor of symmetric `a (n, n)`; not finite if there is none."""
    return by_platform(tpu=_lower_by_panels, default=lower_factors)(a)


def lower_factors(a: jax.Array) -> jax.Array:
    """The factors of a stack `(..., n, n)`, for CPUs and GPUs."""
    # LAPACK takes matrices by columns: those of the transpose are rows of `a`.
    return in_rows([jax.lax.linalg.cholesky(a.mT, symmetrize_input=False)])[0]


def inverse_of_lower(a: jax.Array) -> jax.Array:
    r"""The inverse of lower triangular `a (..., b, b)`, of an order of a panel, by products alone.

    Blocks double in each round: $X \leftarrow X - X B X$ with the inverses $X$ of the diagonal
    blocks and the blocks $B$ beside them. LAPACK's solve of a batch may wait for threads forever
    (`docs/xla.md`, "LAPACK").
    """
    i, j = jnp.mgrid[: a.shape[-1], : a.shape[-1]]
    eye = i == j

    def double(k: jax.Array, x: jax.Array) -> jax.Array:
        beside = jnp.where((i ^ j) >> k == 1, a, 0)
        found = jnp.matmul(beside, x, precision=HIGHEST)
        return x - jnp.matmul(x, found, precision=HIGHEST)

    start = jnp.where(eye, 1 / jnp.where(eye, a, 1), 0)
    return jax.lax.fori_loop(0, (a.shape[-1] - 1).bit_length(), double, start)


@jax.jit
def _lower_by_panels(a: jax.Array) -> jax.Array:
    order = a.shape[-1]
    panels, together = _panel_counts(order)
    room, tile = panels * WIDTH - order, together * WIDTH
    a = jax.scipy.linalg.block_diag(a, jnp.eye(room, dtype=a.dtype)) if room else a
    row, rows = jnp.arange(len(a)), panels // together

    def panel(p: jax.Array, lower: jax.Array) -> jax.Array:
        start = p * WIDTH
        left = jax.lax.dynamic_slice_in_dim(lower, start, WIDTH, 0)
        first, across = p // together, -(-p // together)

        def subtract(i: jax.Array, own: jax.Array) -> jax.Array:
            at, summands = (first + i // across) * tile, i % across * tile
            factor = jax.lax.dynamic_slice(lower, (at, summands), (tile, tile))
            other = jax.lax.dynamic_slice_in_dim(left, summands, tile, 1)
            new = jax.lax.dynamic_slice_in_dim(own, at, tile, 0)
            new = new - jnp.matmul(factor, other.mT, precision=HIGHEST)
            return jax.lax.dynamic_update_slice_in_dim(own, new, at, 0)

        own = jax.lax.dynamic_slice_in_dim(a, start, WIDTH, 1)
        own = jax.lax.fori_loop(0, (rows - first) * across, subtract, own)
        corner = jax.lax.dynamic_slice_in_dim(own, start, WIDTH, 0)
        corner = jax.lax.linalg.cholesky(corner, symmetrize_input=False)
        own = jax.lax.linalg.triangular_solve(corner, own, lower=True, transpose_a=True)
        own = jnp.where((row < start)[:, None], 0, own)
        own = jax.lax.dynamic_update_slice_in_dim(own, corner, start, 0)
        return jax.lax.dynamic_update_slice_in_dim(lower, own, start, 1)

    lower = jax.lax.fori_loop(0, panels, panel, zeros_beside(a, a.shape))
    return lower[:order, :order]


def _panel_counts(order: int) -> tuple[int, int]:
    """How many panels a matrix has, filled up so that tiles cover it, and how many a tile has."""
    least = -(-order // WIDTH)
    together = min(range(min(least, 4), min(least, 2) - 1, -1), key=lambda k: -least % k)
    return least + -least % together, together
