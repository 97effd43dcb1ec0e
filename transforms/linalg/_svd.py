r"""Singular value decompositions.

*On TPUs and GPUs*, as in JAX's own for TPUs (Nakatsukasa and Higham, 2013), by the polar
decomposition $X = H P$ and the eigendecomposition of $H = X P^\top = U \Sigma U^\top$. The polar
factor $P$ is made by products (`_by_products.py`). It has the singular vectors of $X$ from the
start, so that values too small to converge, below `eps · σ_max`, only lower eigenvalues of $H$ that
are rounding already. The rows of $U^\top P$ are orthonormal but for these, and QR makes all of them
so. If only leading left vectors are wanted, at most half of them, they are those of the Gram matrix
$X X^\top$: trailing ones of it, below $\sqrt{\mathrm{eps}}\, \sigma_{max}$, would be rounding
noise. *Cost* for `m ≤ n`: 16 rounds of `4m²n + 2m³` FLOPs, and one `eigh` of order `m`;
with the Gram matrix one product and the `eigh`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._side import LEFT
from ._by_products import polar_by_products
from ._eigh import eigh
from ._numerics import HIGHEST, magnitude, power_of_two
from ._platforms import by_platform
from ._products import exact_product, gram
from ._qr import qr


def thin_svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`U (m, k)`, descending `s (k,)` and `Vᵀ (k, n)` of `x (m, n)`, `k = min(m, n)`."""
    by_lapack = lambda x: tuple(jnp.linalg.svd(x, full_matrices=False))  # noqa: E731
    return by_platform(gpu=_svd_by_products, tpu=_svd_by_products, default=by_lapack)(x)


def leading_vectors(x: jax.Array, rank: int) -> jax.Array:
    """The left singular vectors `(m, rank)` of `x (m, n)` with the largest singular values."""

    def by_svd(x: jax.Array) -> jax.Array:
        return thin_svd(x)[0][:, :rank]

    def by_gram(x: jax.Array) -> jax.Array:
        near_one = x * jnp.ldexp(jnp.ones((), x.dtype), -power_of_two(magnitude(x)))
        return eigh(gram(near_one, LEFT, HIGHEST))[0][:, ::-1][:, :rank]

    if x.shape[0] > x.shape[1] or 2 * rank > x.shape[0]:
        return by_svd(x)
    return by_platform(gpu=by_gram, tpu=by_gram, default=by_svd)(x)


@jax.jit
def _svd_by_products(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if x.shape[0] > x.shape[1]:
        v, s, ut = _svd_by_products(x.mT)
        return ut.mT, s, v.mT
    exponent = power_of_two(magnitude(x))
    near_one = x * jnp.ldexp(jnp.ones((), x.dtype), -exponent)
    polar = polar_by_products(near_one)
    h = exact_product(near_one, polar.mT)
    q, d = eigh((h + h.mT) / 2)
    u = q[:, ::-1]
    v, r = qr(exact_product(polar.mT, u))
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(x.dtype)
    s = jnp.where(d < 0, 0, d)[::-1] * jnp.ldexp(jnp.ones((), x.dtype), exponent)
    return u, s, (v * signs[None]).mT
