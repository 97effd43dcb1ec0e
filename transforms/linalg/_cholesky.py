r"""Cholesky decompositions.

*On TPUs* in a loop over panels of `WIDTH` columns: a panel of $L$ is that of $A - L L^\top$, with
the panels so far, divided by the Cholesky factor of its diagonal block. *Cost*: $n^3/3$ FLOPs in
products, without tiles of zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._loops import each_matrix, while_at_most
from ._numerics import HIGHEST
from ._platforms import by_platform, diagonals, in_rows, with_diagonal, zeros_beside

RETRIES = 3
"""With 10, 100 and 1000 times the rounding error of `A` on the diagonal."""

WIDTH = 128
"""Columns of a panel; XLA has blocks of the same width."""


@functools.partial(jax.jit, static_argnames="damping_mode")
def factored(
    x: jax.Array, eps: jax.typing.ArrayLike, damping_mode: str
) -> tuple[jax.Array, jax.Array]:
    """The lower Cholesky factors of `x + ε I`, `(..., d, d)`, and which of them failed, `(...)`."""
    attempts = functools.partial(_attempts, eps=eps, relative=damping_mode == "relative")
    return attempts(x) if x.ndim == 2 else each_matrix(attempts, x, attempts)


def _attempts(
    x: jax.Array, eps: jax.typing.ArrayLike, relative: bool
) -> tuple[jax.Array, jax.Array]:
    """`factored`, of all matrices at once."""
    order, diagonal = x.shape[-1], diagonals(x)
    largest = jnp.max(diagonal, axis=-1)
    rounding = order * jnp.finfo(x.dtype).eps * largest
    epsilon = eps * (jnp.where(largest > 0, largest, 1) if relative else 1)
    more = jnp.asarray([0, *(10**i for i in range(1, RETRIES + 1))], x.dtype)

    def attempt(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, ...]:
        count, c, failed = state
        added = jnp.asarray(epsilon + rounding * more[count], x.dtype)
        new = lower_factor(with_diagonal(x, diagonal + added[..., None]))
        # A decomposition that fails leaves NaNs on the diagonal, from the failing row on.
        finite = jnp.isfinite(new[..., -1, -1] + largest)
        c = new if x.ndim == 2 else jnp.where(failed[..., None, None], new, c)
        return count + 1, c, failed & ~finite

    # The first attempt is in the loop too: a second decomposition makes programs longer.
    running = lambda s: (s[0] <= RETRIES) & jnp.any(s[2])  # noqa: E731
    start = jnp.int32(0), x, jnp.ones(x.shape[:-2], bool)
    _, c, failed = while_at_most(RETRIES + 1, running, attempt, start)
    if relative:  # to a largest entry of 0: zeros stay zeros
        c = jnp.where((largest == 0)[..., None, None], 0, c)
    return c, failed


def lower_factor(a: jax.Array) -> jax.Array:
    """The lower Cholesky factor of symmetric `a (n, n)`, or of a stack, or what is not finite."""
    # LAPACK takes matrices by columns: those of the transpose are rows of `a`.
    by_rows = lambda a: in_rows(jax.lax.linalg.cholesky(a.mT, symmetrize_input=False))  # noqa: E731
    return by_rows(a) if a.ndim > 2 else by_platform(tpu=_lower_by_panels, default=by_rows)(a)


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

        def subtract(i: jax.Array, columns: jax.Array) -> jax.Array:
            at, summands = (first + i // across) * tile, i % across * tile
            factor = jax.lax.dynamic_slice(lower, (at, summands), (tile, tile))
            other = jax.lax.dynamic_slice_in_dim(left, summands, tile, 1)
            new = jax.lax.dynamic_slice_in_dim(columns, at, tile, 0)
            new = new - jnp.matmul(factor, other.mT, precision=HIGHEST)
            return jax.lax.dynamic_update_slice_in_dim(columns, new, at, 0)

        columns = jax.lax.dynamic_slice_in_dim(a, start, WIDTH, 1)
        columns = jax.lax.fori_loop(0, (rows - first) * across, subtract, columns)
        corner = jax.lax.dynamic_slice_in_dim(columns, start, WIDTH, 0)
        corner = jax.lax.linalg.cholesky(corner, symmetrize_input=False)
        columns = jax.lax.linalg.triangular_solve(corner, columns, lower=True, transpose_a=True)
        columns = jnp.where((row < start)[:, None], 0, columns)
        columns = jax.lax.dynamic_update_slice_in_dim(columns, corner, start, 0)
        return jax.lax.dynamic_update_slice_in_dim(lower, columns, start, 1)

    lower = jax.lax.fori_loop(0, panels, panel, zeros_beside(a, a.shape))
    return lower[:order, :order]


def _panel_counts(order: int) -> tuple[int, int]:
    """How many panels a matrix has, filled up so that tiles cover it, and how many a tile has."""
    least = -(-order // WIDTH)
    together = min(range(min(least, 4), min(least, 2) - 1, -1), key=lambda k: -least % k)
    return least + -least % together, together
