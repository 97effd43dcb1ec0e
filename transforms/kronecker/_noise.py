r"""Noise of a gradient: the part outside of the ranges of both factors.

Roots of both sides raise this part over the rest by up to $(d_{\max}/f)^{2/p}$, where $f$ is the
damped rounding of an eigenvalue of 0. A gradient of low rank has only its rounding there. For $p =
2$ this rounding, and that of the products with the roots, would become the larger part of the
direction. So a matrix with such eigenvalues, $d \le 8\,\mathrm{eps}\,d_{\max}$ at the last refresh,
on both sides gets its direction in the eigenbases:

$$\tilde G = Q_L^\top G Q_R, \qquad
D = Q_L\, \mathrm{diag}(r_L)\, \tilde G\, \mathrm{diag}(r_R)\, Q_R^\top$$

without the entries of $\tilde G$ that have such eigenvalues on both sides, if the norm of all of
them is at most $\sqrt{\max(m, n)}\,\mathrm{eps}\,\|G\|$. That is five times the rounding of a
gradient, and less than the part of it that is new since the refresh. First directions of gradients
of rank 1 and 4 then have at most 1/320 of their length outside of the gradient's spaces, with any
damping. Roots need no other floor than $12\,\mathrm{eps}\,d_{\max}$, which keeps the rounding of
near-singular gradients from turning directions. From $\epsilon = 12\,\mathrm{eps}\,d_{\max}$ on,
directions in float32 are within 0.02 of those in float64 (`tests/optimizers/test_rounding.py`).

*Cost*: four products beside the two with the roots, at steps where a matrix of the batch has such
eigenvalues on both sides. The others of the batch keep the direction from their roots.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..linalg._inverse_root import root_eigenvalues
from ..linalg._numerics import EIGENVALUE_NOISE
from ..linalg._products import exact_product

FLOOR = 12.0
"""Roots raise damped eigenvalues to at least this multiple of `eps · d_max`. Below 10, another
rounding of the gradient turns directions by more than `docs/distribution.md` says."""


def eigenvalue_floor(dtype: jax.typing.DTypeLike) -> float:
    """The least share of the largest eigenvalue that a root takes for an eigenvalue."""
    return FLOOR * float(jnp.finfo(dtype).eps)


def in_eigenbases(m: jax.Array, left: Any, right: Any, root: Any) -> jax.Array:
    """Directions of `m (..., m, n)`, G or its momentum, from factors with eigenpairs."""
    u, v = left.eigenvectors, right.eigenvectors
    g = exact_product(u.mT, exact_product(m.astype(u.dtype), v))
    low = is_noise(left)[..., :, None] & is_noise(right)[..., None, :]
    size, norm = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (jnp.where(low, g, 0), g))
    empty = size <= max(g.shape[-2:]) ** 0.5 * float(jnp.finfo(g.dtype).eps) * norm
    rows, columns = (_in_use(factor, root) for factor in (left, right))
    g = jnp.where(low & empty[..., None, None], 0, g)
    g = rows[..., :, None] * g * columns[..., None, :]
    return exact_product(u, exact_product(g, v.mT)).astype(m.dtype)


def is_noise(factor: Any) -> jax.Array:
    """Which eigenvalues `(..., d)` are noise beside the largest; none before a refresh."""
    d = factor.eigenvalues
    largest = jnp.max(d, axis=-1, keepdims=True)
    return (d <= EIGENVALUE_NOISE * float(jnp.finfo(d.dtype).eps) * largest) & (largest > 0)


def _in_use(factor: Any, root: Any) -> jax.Array:
    """Eigenvalues of the inverse roots in use, `(..., d)`: 1 before a refresh."""
    d, damping = factor.eigenvalues, factor.damping[..., None]
    found = root_eigenvalues(d, root, damping, floor=eigenvalue_floor(d.dtype))
    return jnp.where(factor.refreshes[..., None] > 0, found, 1)
