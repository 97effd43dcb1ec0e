r"""QR decompositions: orthonormal bases, their complements, and orthogonal matrices as reflectors.

$$U = H_1 H_2 \cdots H_d\, S, \qquad H_k = I - 2\,\frac{v_k v_k^\top}{v_k^\top v_k}, \qquad
S = \mathrm{diag}(\pm 1)$$

with $v_k$ zero above its $k$-th entry: the strictly lower triangle of $V = (v_1 \dots v_d)$ has as
many numbers as an orthogonal matrix has degrees of freedom. Any $V$ without a zero column gives a
matrix that is orthogonal up to rounding, whatever the lengths of its columns, so an error of $V$
turns the basis and does not distort it.

*Panels.* A panel of $b$ consecutive reflectors is $I - V_p T_p V_p^\top$, where $T_p^{-1}$ is the
upper triangle of $V_p^\top V_p$ with half its diagonal (Schreiber and Van Loan, 1989; Puglisi,
1992). Loops over panels keep programs small at any order. Decompositions for TPUs, and on GPUs
those of stacks of `MANY` matrices and more (`docs/xla.md`, "GPUs"), factor a panel column by column
and apply it to all columns. Bases are as orthonormal as by LAPACK, also of dependent columns and
zeros; a column that is not finite gives one that is not.

*Cost.* A decomposition `m × n`, `m ≥ n`, takes about `4 m n²` FLOPs for the reflectors and `3 m n²`
for the basis. `panels_of` takes `4 d² b`, and `2 d²` of memory. In place of the `2 d²n` FLOPs of a
product with $U$, `reflected` takes `4 d²n` up to order 511, `3 d²n` at 512 and `2.5 d²n` from 1024
on, in thin products: it leaves out rows above panels in two to four loops. `formed` takes `4 d³` up
to order 255, `2.5 d³` at 256 and `1.9 d³` from 512 on, so it pays for two products or more with at
least `d` columns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ._loops import each_matrix
from ._numerics import HIGHEST, safe_root
from ._platforms import by_platform, diagonals, zeros_beside
from ._products import at, exact_product, multiplied

MANY = 8
"""Stacks of so many matrices are decomposed at once on GPUs."""

PANEL = 64
"""Reflectors that are applied together."""

MOST_LOOPS, LEAST_PANELS, LEAST_FORMED = 4, 4, 2
"""Loops over panels at most, and panels of a loop at least, for products and to form a matrix."""


def _or_by_panels(by_panels: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    """A decomposition of `a (m, n)`, in another form on TPUs, and of stacks on GPUs."""

    def decorated(by_lapack: Callable[[jax.Array], Any]) -> Any:
        def of_one(a: jax.Array) -> Any:
            return by_platform(tpu=by_panels, default=by_lapack)(a)

        of_stack = custom_vmap(of_one)

        @of_stack.def_vmap
        def _(size: int, is_batch: list[bool], a: jax.Array) -> tuple[Any, Any]:
            made = _each_by_panels(of_stack, by_panels, a)
            return made, jax.tree.map(lambda _: True, made)

        # What stands for a stack has no derivative in reverse mode.
        decomposed = jax.custom_jvp(lambda a: of_stack(a))
        decomposed.defjvp(lambda primals, tangents: jax.jvp(of_one, primals, tangents))
        return functools.update_wrapper(decomposed, by_lapack)

    return decorated


@_or_by_panels(lambda a: _qr_by_panels(a))
def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`Q (m, k)` with orthonormal columns and triangular `R (k, n)` of `a (m, n)`, `k = min`."""
    q, r = jnp.linalg.qr(a)
    return q, r


@_or_by_panels(lambda u: _complement_by_panels(u))
def orthogonal_complement(u: jax.Array) -> jax.Array:
    """An orthonormal basis `(m, m - r)` of the orthogonal complement of `u (m, r)`."""
    return jnp.linalg.qr(u, mode="complete")[0][:, u.shape[1] :]


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
    """`V`, with unit diagonal and entries of at most 1, and the signs `S` of `u (..., d, d)`."""
    if u.ndim > 2:
        return _each_by_panels(reflectors_of, _signed_by_panels, u)
    return by_platform(tpu=_signed_by_panels, default=_signed)(u)


def _signed(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    packed, tau = jnp.linalg.qr(u, mode="raw")
    a = packed.mT  # R on and above the diagonal, V below
    eye = jnp.eye(len(u), dtype=u.dtype)
    # LAPACK leaves a column that needs no reflection as it is; ours reflects it.
    signs = jnp.where((diagonals(a) < 0) ^ (tau == 0), -1, 1).astype(u.dtype)
    return jnp.tril(a, -1) + eye, signs


@jax.jit
def _signed_by_panels(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    v, r = householder(u)
    signs = jnp.where(diagonals(r) < 0, -1, 1).astype(u.dtype)
    return v / diagonals(v)[None], signs


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
    """`V (m, k)` and `R (k, n)` with `a = H_1 ⋯ H_k R` for `a (m, n)`, `k = min(m, n)`."""
    # `H = I - v vᵀ` for each column `v` of `V`, of squared length 2 and zero above the diagonal.
    m, n = a.shape
    k = min(m, n)
    rows = jnp.arange(m)

    def add_panel(p: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, v = state
        start = p * PANEL

        def reflect(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> Any:
            panel, reflectors = state
            column = jax.lax.dynamic_index_in_dim(panel, j, 1, keepdims=False)
            vector = jnp.where(start + j < k, _reflector(column, rows - start - j), 0)
            inner = jnp.sum(vector[:, None] * panel, axis=0, keepdims=True)
            return panel - vector[:, None] * inner, reflectors.at[:, j].set(vector)

        panel = jax.lax.dynamic_slice_in_dim(a, start, PANEL, 1)
        reflectors = zeros_beside(panel, panel.shape)
        panel, reflectors = jax.lax.fori_loop(0, PANEL, reflect, (panel, reflectors))
        a = _by_panel(reflectors, a, inverse=True)
        # Exact zeros below the diagonal, where later reflectors leave them.
        triangle = jnp.where(rows[:, None] > start + jnp.arange(PANEL)[None], 0, panel)
        a = jax.lax.dynamic_update_slice_in_dim(a, triangle, start, 1)
        return a, jax.lax.dynamic_update_slice_in_dim(v, reflectors, start, 1)

    panels = -(-k // PANEL)
    a = jnp.pad(a, [(0, 0), (0, -n % PANEL)])
    v = zeros_beside(a, (m, panels * PANEL))
    a, v = jax.lax.fori_loop(0, panels, add_panel, (a, v))
    return v[:, :k], a[:k, :n]


def _apply_reflectors(v: jax.Array, x: jax.Array) -> jax.Array:
    """`H_1 ⋯ H_k x` for `v (m, k)` of squared length 2, in one loop; `reflected` has up to four."""
    v = jnp.pad(v, [(0, 0), (0, -v.shape[1] % PANEL)])
    panels = v.shape[1] // PANEL

    def reflect(p: jax.Array, x: jax.Array) -> jax.Array:
        panel = jax.lax.dynamic_slice_in_dim(v, (panels - 1 - p) * PANEL, PANEL, 1)
        return _by_panel(panel, x)

    return jax.lax.fori_loop(0, panels, reflect, x)


def _by_panel(v: jax.Array, x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """`H_1 ⋯ H_b x`, or `H_b ⋯ H_1 x`, for one panel `v (m, b)`."""
    with at("float32"):
        # Reflections have taken the squared lengths for 2, which they are up to rounding.
        gram = jnp.where(jnp.eye(v.shape[1], dtype=bool), 2, exact_product(v.mT, v))
        triangle = _triangle_of(gram)
        turned = jnp.matmul(v, triangle.mT if inverse else triangle, precision=HIGHEST)
        return x - exact_product(turned, exact_product(v.mT, x))


def _reflector(column: jax.Array, below: jax.Array) -> jax.Array:
    """`v` whose reflection leaves nothing of `column` beneath the row where `below (m,)` is 0."""
    first = (below == 0).astype(column.dtype)
    x = jnp.where(below < 0, 0, column)
    largest = jnp.max(jnp.abs(x))
    x = x / jnp.where(largest == 0, 1, largest)
    norm = safe_root(jnp.sum(x * x))
    v = x + jnp.where(jnp.sum(first * x) < 0, -norm, norm) * first
    v = jnp.where(norm == 0, first, v)  # of zeros
    return v * jax.lax.rsqrt(jnp.sum(v * v) / 2)


class Reflectors(NamedTuple):
    """A batch of matrices `H_1 ⋯ H_k S` of order `d`, in panels of `b` reflectors."""

    rows: jax.Array  # V_pᵀ, (..., ⌈k/b⌉, b, d)
    products: jax.Array  # (V_p T_p)ᵀ, of the same shape
    signs: jax.Array  # the diagonal of S, (..., d)

    def loops(self, least: int) -> list[tuple[int, int]]:
        """The first panel and the number of panels of each loop; about `least` or more in each."""
        number = self.rows.shape[-3]
        share = -(-number // max(1, min(MOST_LOOPS, number // least)))
        return [(start, min(share, number - start)) for start in range(0, number, share)]


@jax.jit  # shared by a program's parts
def panels_of(v: jax.Array, signs: jax.Array) -> Reflectors:
    """The panels of lower triangular `v (..., d, d)`."""
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -v.shape[-1] % PANEL)])
    rows = v.mT.reshape(*v.shape[:-2], -1, PANEL, v.shape[-2])
    gram = jnp.matmul(rows, rows.mT, precision=HIGHEST)
    return Reflectors(rows, jnp.matmul(_triangle_of(gram).mT, rows, precision=HIGHEST), signs)


@functools.partial(jax.jit, static_argnames="inverse")
def reflected(u: Reflectors, x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """`U x`, or `Uᵀ x`, for `x (..., d, n)`."""
    x = x if inverse else u.signs[..., None] * x
    loops = u.loops(LEAST_PANELS)
    for start, number in loops if inverse else reversed(loops):
        row = start * PANEL
        rest = _apply_panels(u, start, number, x[..., row:, :], inverse)
        x = jnp.concatenate([x[..., :row, :], rest], axis=-2) if row else rest
    return u.signs[..., None] * x if inverse else x


@functools.partial(jax.jit, static_argnames="precision")
def formed(u: Reflectors, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """`U (..., d, d)`."""
    rows, built = u.rows[..., 0, :, :], None
    for start, number in reversed(u.loops(LEAST_FORMED)):
        # The reflectors of this loop change nothing before their rows, in rows or columns.
        new = u.rows.shape[-1] - start * PANEL if built is None else number * PANEL
        zeros = zeros_beside(rows, (*rows.shape[:-2], new, new))
        corner = zeros + jnp.broadcast_to(jnp.eye(new, dtype=rows.dtype), zeros.shape)
        if built is not None:  # block diagonal
            edge, size = [(0, 0)] * (corner.ndim - 2), built.shape[-1]
            corner = jnp.pad(corner, [*edge, (0, size), (0, size)])
            corner = corner + jnp.pad(built, [*edge, (new, 0), (new, 0)])
        built = _apply_panels(u, start, number, corner, precision=precision)
    assert built is not None
    return built * u.signs[..., None, :]


def _apply_panels(
    u: Reflectors,
    start: int,
    number: int,
    x: jax.Array,
    inverse: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Applies so many panels to the rows `x` from the first one's on."""
    first, second = (u.products, u.rows) if inverse else (u.rows, u.products)

    def body(j: jax.Array, x: jax.Array) -> jax.Array:
        panel = start + (j if inverse else number - 1 - j)
        a, b = (
            jax.lax.dynamic_index_in_dim(y, panel, -3, keepdims=False)[..., start * PANEL :]
            for y in (first, second)
        )
        inner = multiplied(a, x, precision)
        return x - multiplied(b.mT, inner, precision)

    return jax.lax.fori_loop(0, number, body, x)


def _triangle_of(gram: jax.Array) -> jax.Array:
    r"""`T_p (..., b, b)` of panels with `gram = V_pᵀ V_p`: an inverse, by products alone.

    Blocks double in each round: $X \leftarrow X - X B X$ with the inverses $X$ of the diagonal
    blocks and the blocks $B$ beside them. A solve may hang (`docs/xla.md`, "LAPACK").
    """
    i, j = jnp.mgrid[:PANEL, :PANEL]
    # A column of zeros, such as those that fill the last panel, reflects nothing.
    lower = jnp.where(i > j, gram, jnp.where(i < j, 0, jnp.where(gram > 0, gram / 2, 1)))

    def double(k: jax.Array, x: jax.Array) -> jax.Array:
        beside = jnp.where((i ^ j) >> k == 1, lower, 0)
        product = jnp.matmul(beside, x, precision=HIGHEST)
        return x - jnp.matmul(x, product, precision=HIGHEST)

    start = jnp.where(i == j, 1 / jnp.where(i == j, lower, 1), 0)
    return jax.lax.fori_loop(0, (PANEL - 1).bit_length(), double, start).mT
