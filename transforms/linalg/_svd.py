r"""Singular value decompositions.

*On TPUs* (`_platforms.py`), as in JAX's own for TPUs (Nakatsukasa and Higham, 2013), by the polar
decomposition $X = H P$ and the eigendecomposition of $H = X P^\top = U \Sigma U^\top$. The polar
factor $P$ comes from the iteration

$$X \leftarrow (15 I - 10 A + 3 A^2) X / 8, \qquad A = X X^\top,$$

which maps $[0, 1]$ monotonically onto itself and nearly doubles small singular values. It has the
singular vectors of $X$ from the start, so that values too small to converge, below `eps · σ_max`,
only lower eigenvalues of $H$ that are rounding already. The rows of $U^\top P$ are orthonormal but
for these, and QR makes all of them so. *Cost* for `m ≤ n`: some 35 rounds of `4m²n + 2m³` FLOPs,
and one `eigh` of order `m`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ._eigh import eigh
from ._numerics import power_of_two
from ._platforms import by_platform
from ._qr import qr
from ._tiles import product


def thin_svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`U (m, k)`, descending `s (k,)` and `Vᵀ (k, n)` of `x (m, n)`, `k = min(m, n)`."""
    return by_platform(_svd_by_products, lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)), x)


@jax.jit
def _svd_by_products(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if x.shape[0] > x.shape[1]:
        v, s, ut = _svd_by_products(x.mT)
        return ut.mT, s, v.mT
    exponent = power_of_two(jnp.max(jnp.abs(x)))
    near_one = x * jnp.ldexp(jnp.ones((), x.dtype), -exponent)
    polar = polar_by_products(near_one)
    h = product(near_one, polar.mT)
    q, d = eigh((h + h.mT) / 2)
    u = q[:, ::-1]
    v, r = qr(product(polar.mT, u))
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(x.dtype)
    s = jnp.where(d < 0, 0, d)[::-1] * jnp.ldexp(jnp.ones((), x.dtype), exponent)
    return u, s, (v * signs[None]).mT


@jax.jit
def polar_by_products(x: jax.Array) -> jax.Array:
    """The polar factor of `x (m, n)`, for singular values of at least `eps · σ_max`.

    In the null space it has rounding errors of any length up to 1. A zero matrix gives zero.
    """
    if x.shape[0] > x.shape[1]:
        return polar_by_products(x.mT).mT
    eye = jnp.eye(len(x), dtype=x.dtype)

    def gram_of(x: jax.Array) -> jax.Array:
        return product(x, x.mT)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        gram = gram_of(x)
        factor = (15 * eye - 10 * gram + 3 * product(gram, gram)) / 8
        return product(factor, x)

    exponent = power_of_two(jnp.max(jnp.abs(x)))
    x = x * jnp.ldexp(jnp.ones((), x.dtype), -exponent)
    # ‖X Xᵀ‖ (Frobenius) is between σ² and √m σ², for the largest singular value σ.
    square = jnp.linalg.norm(gram_of(x))
    x = x * jnp.where(square > 0, jax.lax.rsqrt(square), 0)
    growth = -math.log(jnp.finfo(x.dtype).eps) + math.log(len(x)) / 4
    rounds = math.ceil(growth / math.log(15 / 8)) + 4
    return jax.lax.fori_loop(0, rounds, step, x)
