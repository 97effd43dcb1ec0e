r"""Noise of a gradient: the part outside of the ranges of both factors.

Roots of both sides raise this part over the rest by up to $(d_{\max}/f)^{2/p}$, where $f$ is the
damped rounding of an eigenvalue of 0. A gradient of low rank has only its rounding there. For $p =
2$ this rounding, and that of the products with the bases, would become the larger part of the
direction. So the entries of $X = U_L^\top G\, U_R$ that have such eigenvalues,
$d \le 8\,\mathrm{eps}\,d_{\max}$ at the last refresh, on both sides become 0, if the norm of all of
them is at most $\sqrt{\max(m, n)}\,\mathrm{eps}\,\|G\|$. That is five times the rounding of a
gradient, and less than the part of it that is new since the refresh. First directions of gradients
of rank 1 and 4 then have at most 1/320 of their length outside of the gradient's spaces, with any
damping. Roots need no other floor than $12\,\mathrm{eps}\,d_{\max}$, which keeps the rounding of
near-singular gradients from turning directions. From $\epsilon = 12\,\mathrm{eps}\,d_{\max}$ on,
directions in float32 are within 0.02 of those in float64 (`tests/optimizers/test_rounding.py`).

This is for bases in a storage that does not round. Otherwise, and on one side alone, roots have the
floor of `linalg/_inverse_root.py`.
"""

import jax
import jax.numpy as jnp

from ..linalg._numerics import EIGENVALUE_NOISE

FLOOR = 12.0
"""Roots raise damped eigenvalues to at least this multiple of `eps · d_max`. Below 10, directions
on another mesh differ by more than `docs/distribution.md` promises."""


def eigenvalue_floor(dtype: jax.typing.DTypeLike) -> float:
    """The least share of the largest eigenvalue that a root takes for an eigenvalue."""
    return FLOOR * float(jnp.finfo(dtype).eps)


def without_noise(x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """`x (..., m, n)` in bases with eigenvalues `(..., m)` and `(..., n)`, without its noise."""
    low = _is_noise(left)[..., :, None] & _is_noise(right)[..., None, :]
    size, norm = (jnp.linalg.norm(y, axis=(-2, -1)) for y in (jnp.where(low, x, 0), x))
    empty = size <= max(x.shape[-2:]) ** 0.5 * float(jnp.finfo(x.dtype).eps) * norm
    return jnp.where(low & empty[..., None, None], 0, x)


def _is_noise(d: jax.Array) -> jax.Array:
    """Which eigenvalues `(..., d)` are noise beside the largest; none before a refresh."""
    largest = jnp.max(d, axis=-1, keepdims=True)
    return (d <= EIGENVALUE_NOISE * float(jnp.finfo(d.dtype).eps) * largest) & (largest > 0)
