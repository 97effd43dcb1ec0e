r"""Singular value decompositions.

*On TPUs and GPUs*, as in JAX's own for TPUs (Nakatsukasa and Higham, 2013), by the polar
decomposition $X = H P$ and the eigendecomposition of $H = X P^\top = U \Sigma U^\top$. The polar
factor $P$ is made by products (`_by_products.py`). It has the singular vectors of $X$ from the
start, so that values too small to converge, below `eps · σ_max`, only lower eigenvalues of $H$ that
are rounding already. The rows of $U^\top P$ are orthonormal but for these, and QR makes all of them
so. *Cost* for `m ≤ n`: 16 rounds of `4m²n + 2m³` FLOPs, and one `eigh` of order `m`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._by_products import polar_by_products
from ._eigh import eigh
from ._numerics import magnitude, power_of_two
from ._platforms import by_platform
from ._products import exact_product
from ._qr import qr


def thin_svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`U (m, k)`, descending `s (k,)` and `Vᵀ (k, n)` of `x (m, n)`, `k = min(m, n)`."""
    by_lapack = lambda x: tuple(jnp.linalg.svd(x, full_matrices=False))  # noqa: E731
    return by_platform(x, gpu=_svd_by_products, tpu=_svd_by_products, default=by_lapack)


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
