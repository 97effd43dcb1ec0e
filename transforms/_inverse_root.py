r"""Inverse roots of symmetric positive semi-definite matrices.

$A^{-1/p}$ with damping, by eigendecomposition $A = Q\,\mathrm{diag}(d)\,Q^\top$: the eigenvalues
become $(\max(d, 0) + \epsilon)^{-1/p}$. With $\epsilon = 0$ the root is taken on the range of $A$
alone: eigenvalues up to `order · eps(dtype) · d_max`, which are rounding noise, give 0.

*Numerics.* Products in `Precision.HIGHEST`. Batches are decomposed one matrix at a time, so that
temporaries do not grow with the batch. Cost: `O(d³)`, about 25 times a product of the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def inverse_root_eigenvalues(
    d: jax.Array, root: int, damping: jax.typing.ArrayLike, *, damping_outside: bool = False
) -> jax.Array:
    """`(max(d, 0) + damping)^(-1/root)` for eigenvalues `d (..., n)`; 0 off the range.

    With `damping_outside` it is `(max(d, 0)^(1/root) + damping)^(-1)`. With `damping = 0` an
    eigenvalue of at most `n · eps · max(d)` is off the range.
    """
    damping = jnp.asarray(damping, d.dtype)
    floor = d.shape[-1] * jnp.finfo(d.dtype).eps * jnp.max(d, axis=-1, keepdims=True)
    positive = jnp.maximum(d, 0)
    on_range = (damping > 0) | (positive > floor)
    if damping_outside:
        power = jnp.where(positive > 0, positive, 0) ** (1 / root) + damping
        return jnp.where(on_range, 1 / jnp.where(on_range, power, 1), 0)
    return jnp.where(on_range, jnp.where(on_range, positive + damping, 1) ** (-1 / root), 0)


def map_spectrum(a: jax.Array, f: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`Q f(d) Qᵀ` for symmetric `a = Q diag(d) Qᵀ (..., n, n)`, one matrix after the other."""

    def one(x: jax.Array) -> jax.Array:
        d, q = jnp.linalg.eigh(x)
        return jnp.matmul(q * f(d), q.T, precision=HIGHEST)

    flat = a.reshape(-1, *a.shape[-2:])
    return jax.lax.map(one, flat).reshape(a.shape)


def inverse_root(a: jax.Array, root: int, damping: jax.typing.ArrayLike = 0.0) -> jax.Array:
    """`(a + damping · I)^(-1/root)` for symmetric positive semi-definite `a (..., n, n)`."""
    return map_spectrum(a, lambda d: inverse_root_eigenvalues(d, root, damping))
