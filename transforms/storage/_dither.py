r"""Dither: thresholds for rounding that change from step to step, without stored noise.

$$u_{ij}(t) = \mathrm{frac}(i\,\alpha_1 + j\,\alpha_2 + t\,\alpha_3)$$

An average that is rounded to the nearest code after every update ignores increments below half a
gap, so at decay rates near 1 it never leaves its first codes. If an element takes the upper code
when its share of the gap exceeds a uniform number, it follows on average. With independent numbers
the errors of $n$ updates add up to $\sqrt n$ gaps. Multiples of an irrational number fill [0, 1)
evenly (Weyl, 1916), so that successive errors of an element cancel; with the two other numbers
neighbors differ. The numbers are exact in 32 bits, and the same on every platform, in every batch
and after a restart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

ALPHAS = tuple(int(2**32 / 1.2207440846**power) | 1 for power in (1, 2, 3))
"""α1, α2 and α3 in units of 2^-32: powers of the inverse root of `x⁴ = x + 1` (Roberts, 2018)."""


def dither(count: jax.Array, rows: int, columns: int) -> jax.Array:
    """U of the updates `count (...)`, int32, for matrices `(..., rows, columns)`; float32."""
    row, column, step = (jnp.uint32(alpha) for alpha in ALPHAS)
    i, j = (jnp.arange(size, dtype=jnp.uint32) for size in (rows, columns))
    place = i[:, None] * row + j[None, :] * column
    turn = (count.astype(jnp.uint32) * step)[..., None, None]
    turned = jnp.broadcast_to(place, (*count.shape, rows, columns)) + turn
    return (turned >> 8).astype(jnp.float32) * 2.0**-24
