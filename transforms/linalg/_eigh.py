r"""Eigendecompositions of symmetric matrices, orthonormal bases made from them, and SVDs.

*Signs.* The sign of an eigenvector is arbitrary, but moments that survive a refresh depend on it.
Here the entry of largest magnitude in each column (the first one of a tie) is positive, whatever
LAPACK or cuSOLVER returns. Equal eigenvalues leave the basis of their eigenspace undetermined.

*On TPUs* by Jacobi's method, and one Newton-Schulz step of $Q$ (`docs/xla.md`, "TPUs").

*SVDs on TPUs and GPUs*, as in JAX's own for TPUs (Nakatsukasa and Higham, 2013), by the polar
decomposition $X = H P$ and the eigendecomposition of $H = X P^\top = U \Sigma U^\top$. $P$ is made
by products (`_by_products.py`); values below `eps · σ_max`, which do not converge there, only lower
eigenvalues of $H$ that are rounding already, and QR makes the rows of $U^\top P$ orthonormal.
*Cost* for `m ≤ n`: 16 rounds of `4m²n + 2m³` FLOPs, and one `eigh` of order `m`.
"""

import jax
import jax.numpy as jnp

from .._side import LEFT
from ._by_products import polar_by_products
from ._numerics import HIGHEST, magnitude, power_of_two, to_one
from ._platforms import by_platform
from ._products import at, exact_product, gram
from ._qr import qr


def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors `Q` and ascending eigenvalues `d` of symmetric `a (n, n)`."""

    def by_columns(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        # LAPACK takes matrices by columns: those of the transpose are rows of the sum.
        return tuple(jnp.linalg.eigh(((a + a.mT) / 2).mT, symmetrize_input=False))[::-1]

    return by_platform(tpu=_polished, default=by_columns)(a)


@jax.jit
def _polished(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`eigh` by Jacobi's method, which squares the entries."""
    exponent = power_of_two(magnitude(a))
    a = (a + a.mT) / 2 * jnp.ldexp(jnp.ones((), a.dtype), -exponent)
    q = jnp.where(jnp.isfinite(a).all(), jacobi(a), jnp.nan)  # which stops at once at a NaN
    with at("float32"):
        gram = exact_product(q.mT, q)
        q = q - exact_product(q, gram - jnp.eye(len(a), dtype=a.dtype)) / 2
        d = jnp.sum(q * exact_product(a, q), axis=0)
    return q, d * jnp.ldexp(jnp.ones((), a.dtype), exponent)


def jacobi(a: jax.Array) -> jax.Array:
    """Eigenvectors of symmetric `a (n, n)` by ascending eigenvalue; no CPU has it from JAX."""
    return jax.lax.linalg.eigh(
        a, symmetrize_input=False, implementation=jax.lax.linalg.EighImplementation.JACOBI
    )[0]


def with_fixed_signs(u: jax.Array) -> jax.Array:
    """`u (..., m, r)` with the entry of largest magnitude in each column positive."""
    largest = jnp.argmax(jnp.abs(u), axis=-2, keepdims=True)
    return u * jnp.where(jnp.take_along_axis(u, largest, axis=-2) < 0, -1, 1).astype(u.dtype)


def thin_svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`U (m, k)`, descending `s (k,)` and `Vᵀ (k, n)` of `x (m, n)`, `k = min(m, n)`."""
    by_lapack = lambda x: tuple(jnp.linalg.svd(x, full_matrices=False))  # noqa: E731
    return by_platform(gpu=_svd_by_products, tpu=_svd_by_products, default=by_lapack)(x)


def leading_vectors(x: jax.Array, rank: int) -> jax.Array:
    """The left singular vectors `(m, rank)` of `x (m, n)` with the largest singular values."""
    # Trailing eigenvectors of a Gram matrix, below `√eps · σ_max`, would be rounding noise.

    def by_svd(x: jax.Array) -> jax.Array:
        return thin_svd(x)[0][:, :rank]

    def by_gram(x: jax.Array) -> jax.Array:
        return eigh(gram(x * to_one(magnitude(x)), LEFT, HIGHEST))[0][:, ::-1][:, :rank]

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
