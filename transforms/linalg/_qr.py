r"""QR decompositions: orthonormal bases of columns, their complements, and their reflectors.

*On TPUs* by Householder reflectors in panels of `PANEL` columns. A loop over the panels factors one
column by column and applies its block reflector to all columns, of which the finished ones stay as
they are. The basis is the product of the reflectors: as orthonormal as by LAPACK, for columns of
any condition, also for dependent ones and zeros. A column that is not finite gives a basis that is
not finite. Columns are scaled one by one, so that no square overflows. *On GPUs* the same, for
stacks of `MANY` matrices and more, also those that `vmap` makes, all at once: each column launches
its kernels once for a stack. cuSOLVER takes smaller stacks, one matrix after the other
(`docs/xla.md`, "GPUs"). Derivatives are those forward.

*Cost* for `m × n`, `m ≥ n`: about `4 m n²` FLOPs for the reflectors, `3 m n²` for the basis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ._loops import each_matrix
from ._numerics import HIGHEST
from ._platforms import by_platform, zeros_beside
from ._products import at, exact_product
from ._reflectors import PANEL, triangle_of

MANY = 8
"""Stacks of so many matrices are decomposed at once on GPUs."""


@custom_vmap
def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`Q (m, k)` with orthonormal columns and triangular `R (k, n)` of `a (m, n)`, `k = min`."""
    return by_platform(tpu=_qr_by_panels, default=lambda a: tuple(jnp.linalg.qr(a)))(a)


@qr.def_vmap
def _qr_of_stacks(size: int, batched: Any, a: jax.Array) -> Any:
    del size, batched
    return _each_by_panels(qr, _qr_by_panels, a), (True, True)


@custom_vmap
def orthogonal_complement(u: jax.Array) -> jax.Array:
    """An orthonormal basis `(m, m - r)` of the orthogonal complement of `u (m, r)`."""
    rank = u.shape[1]
    by_lapack = lambda u: jnp.linalg.qr(u, mode="complete")[0][:, rank:]  # noqa: E731
    return by_platform(tpu=_complement_by_panels, default=by_lapack)(u)


@orthogonal_complement.def_vmap
def _complement_of_stacks(size: int, batched: Any, u: jax.Array) -> Any:
    del size, batched
    return _each_by_panels(orthogonal_complement, _complement_by_panels, u), True


def bases_of(a: jax.Array) -> jax.Array:
    """Orthonormal bases `(..., m, k)` of the columns of `a (..., m, n)`, `k = min(m, n)`."""
    return _each_by_panels(lambda x: qr(x)[0], lambda x: _qr_by_panels(x)[0], a)


def _each_by_panels(
    one: Callable[[jax.Array], Any], by_panels: Callable[[jax.Array], Any], x: jax.Array
) -> Any:
    """Either form of a decomposition for each matrix of `x (..., m, n)`."""

    def at_once(stack: jax.Array) -> Any:
        return jax.vmap(by_panels)(stack) if len(stack) >= MANY else jax.lax.map(one, stack)

    return each_matrix(one, x, at_once)


def reflectors_of(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`V` with unit diagonal and the signs `S` of orthogonal matrices `u (..., d, d)`.

    Below the diagonal no entry of `V` is above 1; above the diagonal it is 0. With `_reflectors.py`
    they make `u`.
    """
    if u.ndim > 2:
        return _each_by_panels(reflectors_of, _signed_by_panels, u)
    return by_platform(tpu=_signed_by_panels, default=_signed)(u)


def _signed(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    packed, tau = jnp.linalg.qr(u, mode="raw")
    a = packed.mT  # R on and above the diagonal, V below
    eye = jnp.eye(len(u), dtype=u.dtype)
    # LAPACK leaves a column that needs no reflection as it is; ours reflects it.
    signs = jnp.where((jnp.diagonal(a) < 0) ^ (tau == 0), -1, 1).astype(u.dtype)
    return jnp.tril(a, -1) + eye, signs


@jax.jit
def _signed_by_panels(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    v, r = householder(u)
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(u.dtype)
    return v / jnp.diagonal(v)[None], signs


@jax.jit
def _qr_by_panels(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    v, r = householder(a)
    return _apply_reflectors(v, zeros_beside(a, v.shape) + jnp.eye(*v.shape, dtype=a.dtype)), r


@jax.jit
def _complement_by_panels(u: jax.Array) -> jax.Array:
    v, _ = householder(u)
    rows, rank = u.shape
    beyond = jnp.eye(rows, rows - rank, -rank, dtype=u.dtype)
    return _apply_reflectors(v, zeros_beside(u, beyond.shape) + beyond)


def householder(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`V (m, k)` and `R (k, n)` with `a = H_1 ⋯ H_k R` for `a (m, n)`, `k = min(m, n)`.

    `H = I - v vᵀ` for each column `v` of `V`, of squared length 2 and zero above the diagonal.
    """
    m, n = a.shape
    k = min(m, n)
    rows = jnp.arange(m)

    def factor(p: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, v = state
        start = p * PANEL

        def reflect(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> Any:
            panel, own = state
            column = jax.lax.dynamic_index_in_dim(panel, j, 1, keepdims=False)
            vector = jnp.where(start + j < k, _reflector(column, rows - start - j), 0)
            inner = jnp.sum(vector[:, None] * panel, axis=0, keepdims=True)
            return panel - vector[:, None] * inner, own.at[:, j].set(vector)

        panel = jax.lax.dynamic_slice_in_dim(a, start, PANEL, 1)
        own = zeros_beside(panel, panel.shape)
        panel, own = jax.lax.fori_loop(0, PANEL, reflect, (panel, own))
        a = _by_panel(own, a, inverse=True)
        # Exact zeros below the diagonal, where later reflectors leave them.
        triangle = jnp.where(rows[:, None] > start + jnp.arange(PANEL)[None], 0, panel)
        a = jax.lax.dynamic_update_slice_in_dim(a, triangle, start, 1)
        return a, jax.lax.dynamic_update_slice_in_dim(v, own, start, 1)

    panels = -(-k // PANEL)
    a = jnp.pad(a, [(0, 0), (0, -n % PANEL)])
    v = zeros_beside(a, (m, panels * PANEL))
    a, v = jax.lax.fori_loop(0, panels, factor, (a, v))
    return v[:, :k], a[:k, :n]


def _apply_reflectors(v: jax.Array, x: jax.Array) -> jax.Array:
    """`H_1 ⋯ H_k x` for `v (m, k)` of squared length 2, in one loop; `_reflectors.py` has four."""
    v = jnp.pad(v, [(0, 0), (0, -v.shape[1] % PANEL)])
    panels = v.shape[1] // PANEL

    def reflect(p: jax.Array, x: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(v, (panels - 1 - p) * PANEL, PANEL, 1)
        return _by_panel(own, x)

    return jax.lax.fori_loop(0, panels, reflect, x)


def _by_panel(v: jax.Array, x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """`H_1 ⋯ H_b x`, or `H_b ⋯ H_1 x`, for one panel `v (m, b)`."""
    with at("float32"):
        # Reflections have taken the squared lengths for 2, which they are up to rounding.
        gram = jnp.where(jnp.eye(v.shape[1], dtype=bool), 2, exact_product(v.mT, v))
        triangle = triangle_of(gram)
        turned = jnp.matmul(v, triangle.mT if inverse else triangle, precision=HIGHEST)
        return x - exact_product(turned, exact_product(v.mT, x))


def _reflector(column: jax.Array, below: jax.Array) -> jax.Array:
    """`v` whose reflection leaves nothing of `column` beneath the row where `below (m,)` is 0."""
    first = (below == 0).astype(column.dtype)
    x = jnp.where(below < 0, 0, column)
    largest = jnp.max(jnp.abs(x))
    x = x / jnp.where(largest == 0, 1, largest)
    norm = jnp.sqrt(jnp.sum(x * x))
    v = x + jnp.where(jnp.sum(first * x) < 0, -norm, norm) * first
    v = jnp.where(norm == 0, first, v)  # of zeros
    return v * jax.lax.rsqrt(jnp.sum(v * v) / 2)
