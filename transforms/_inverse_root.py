r"""Inverse roots of symmetric positive semi-definite matrices, by eigendecomposition.

$A^{-1/p}$ with damping $\epsilon$: from $A = Q\,\mathrm{diag}(d)\,Q^\top$ the eigenvalues become

| damping | eigenvalue of the root |
|---|---|
| "absolute" | $(\max(d, 0) + \epsilon)^{-1/p}$ |
| "relative" | $(\max(d, 0) + \epsilon\,d_{\max})^{-1/p}$ |
| "floor" | $\max(d, \epsilon)^{-1/p}$ |
| "outside" | $(\max(d, 0)^{1/p} + \epsilon)^{-1}$ |

*Rank deficiency.* With $\epsilon = 0$ the root is taken on the range of $A$ alone: eigenvalues up
to `order · eps(dtype) · d_max`, which are rounding noise, give 0. Otherwise damping decides.

*Numerics.* Products in `Precision.HIGHEST`; non-finite input gives a non-finite root. Cost: one
symmetric eigendecomposition, about 25 times a matrix product of the same order on a CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST

DAMPINGS = ("absolute", "relative", "floor", "outside")


def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors `Q` and ascending eigenvalues `d` of symmetric `a (n, n)`."""
    d, q = jnp.linalg.eigh(a)
    return q, d


def root_eigenvalues(
    d: jax.Array, root: int, damping: jax.typing.ArrayLike, kind: str = "absolute"
) -> jax.Array:
    """Eigenvalues of the inverse root for eigenvalues `d (..., n)`; see the module's table."""
    largest = jnp.max(d, axis=-1, keepdims=True)
    damping = jnp.asarray(damping, d.dtype)
    on_range = (damping > 0) | (d > d.shape[-1] * jnp.finfo(d.dtype).eps * largest)
    positive = jnp.maximum(d, 0)
    if kind == "outside":
        base = jnp.where(positive > 0, positive, 0) ** (1 / root) + damping
        power = -1.0
    else:
        base = (
            jnp.maximum(positive, damping)
            if kind == "floor"
            else positive + damping * (jnp.maximum(largest, 0) if kind == "relative" else 1)
        )
        power = -1 / root
    usable = on_range & (base > 0) | jnp.isnan(d)
    return jnp.where(usable, jnp.where(usable, base, 1) ** power, 0)


def is_indefinite(d: jax.Array) -> jax.Array:
    """Whether an eigenvalue of `d (n,)` is negative by more than rounding."""
    return jnp.min(d) < -d.shape[-1] * jnp.finfo(d.dtype).eps * jnp.max(jnp.abs(d))


def from_eigen(q: jax.Array, d: jax.Array) -> jax.Array:
    """`Q diag(d) Qᵀ` for `q (..., n, n)` and `d (..., n)`."""
    return jnp.matmul(q * d[..., None, :], q.mT, precision=HIGHEST)


def inverse_root_by_eigh(
    a: jax.Array, root: int, damping: jax.typing.ArrayLike = 0.0, kind: str = "absolute"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`a^(-1/root)` for `a (n, n)`, an error estimate, and whether `a` is indefinite.

    The estimate is `‖A Q - Q diag(d)‖ / ‖A‖` (Frobenius): a backward error, a few times eps(dtype).
    Squares of the entries have to be in range: `solve_root` scales.
    """
    q, d = eigh(a)
    residual = jnp.linalg.norm(jnp.matmul(a, q, precision=HIGHEST) - q * d[None, :])
    norm = jnp.linalg.norm(a)
    error = jnp.where(norm > 0, residual / jnp.where(norm > 0, norm, 1), 0)
    return from_eigen(q, root_eigenvalues(d, root, damping, kind)), error, is_indefinite(d)
