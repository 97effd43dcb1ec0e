r"""Inverse roots by iterations that use only matrix products, and the largest eigenvalue.

*Coupled Newton* (Schur-Newton; Guo and Higham, 2006), for $A_\epsilon = A + \epsilon I$ and $p \ge
1$:
$$M_0 = z A_\epsilon, \quad X_0 = z^{1/p} I, \quad T = \tfrac{(p+1) I - M}{p}, \quad
X \leftarrow X T, \quad M \leftarrow T^p M$$
with $z = (1 + p) / (2 \lambda)$, $\lambda \ge \lambda_{\max}$: $M \to I$ and $X \to
A_\epsilon^{-1/p}$.

*Newton-Schulz*, for $p = 2$: with $M = Z Y$ and a polynomial $T$ of $M$,
$$Y_0 = A_\epsilon / \lambda, \quad Z_0 = I, \quad Y \leftarrow Y T, \quad Z \leftarrow T Z$$
$Y \to (A_\epsilon / \lambda)^{1/2}$ and $Z$ to its inverse. "newton_schulz" has $T = (3I - M)/2$
(Gong et al., arXiv:2502.07752, B.8). "products" has a fixed number of steps $T = a I + b M + c
M^2$, and roots of higher order, $p = 4, 8, \dots$, are roots of $Y$. An eigenvalue $t^2$ of $M$
becomes $(t\,(a + b t^2 + c t^4))^2$, and each row $(a, b, c)$ makes the largest distance of this
from 1 least, over all $t$ that the rows before leave (Amsel et al., The Polar Express,
arXiv:2505.16932, for the sign function, which is this iteration: Higham, 1997). Rows are for
condition numbers of `A_ε` up to `1 / (8 eps)`, 1e6 in float32: 7 rounds, and 5 more for `p = 4`.
`docs/performance_details.md`, "Roots by products", has the errors.

*Damping* relative to $\lambda_{\max}$ takes it from 32 power iterations, from below: 0.4 % too
small for Gaussian factors, and at most `log(n) / 64` where the largest eigenvalues are close.

*Rank deficiency.* All need damping, and eigenvalues below `eps(dtype) · λ_max` are not resolved.
Without damping they diverge along the null space, where rounding makes `M` look converged. The
error estimate therefore uses the root itself, `max |X^p A_ε - I|`. *Cost* per iteration, order `n`:
`2n³ (1 + ⌈log₂ p⌉ + 1)` FLOPs (Newton), `6n³` (Newton-Schulz), `8n³` (by products). `eigh` is
cheaper on a CPU, where it takes as long as 14 products; on a GPU it is expensive at large orders.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._validate import checked
from ._coefficients import Rows, square_root_rows
from ._loops import while_at_most
from ._numerics import HIGHEST, RESOLVED, magnitude, safe_norm
from ._products import exact_product
from ._schatten import SPECTRAL, schatten_norms

MAX_ITERATIONS = 100  # of coupled Newton
NEWTON_SCHULZ_STEPS = 40


@checked
def power_iteration(a: jax.Array, iterations: int = 32) -> jax.Array:
    """Estimates the largest eigenvalue of symmetric positive semi-definite `a (n, n)` from below.

    Starts from the row sums of `|a|`, which have a component along the leading eigenvector unless
    it cancels exactly. The relative error of the Rayleigh quotient is about
    `(λ₂/λ₁)^(2·iterations)`. A zero matrix gives zero.
    """

    def power_step(_: jax.Array, v: jax.Array) -> jax.Array:
        w = jnp.matmul(a, v, precision=HIGHEST)
        norm = safe_norm(w)
        return jnp.where(norm > 0, w / _positive(norm), v)

    scale = jnp.max(jnp.abs(a))
    a = a / _positive(scale)
    start = jnp.sum(jnp.abs(a), axis=-1) + jnp.linspace(0.5, 1.0, a.shape[-1], dtype=a.dtype)
    v = jax.lax.fori_loop(0, iterations, power_step, start / safe_norm(start))
    return scale * jnp.dot(v, jnp.matmul(a, v, precision=HIGHEST), precision=HIGHEST)


class _Newton(NamedTuple):
    """The iterates, and the previous X."""

    x: jax.Array
    m: jax.Array
    error: jax.Array
    best: jax.Array
    best_error: jax.Array
    count: jax.Array


def _coupled_newton(a: jax.Array, root: int) -> jax.Array:
    """`a^(-1/root)` for positive definite `a (n, n)`."""
    # From the second step on `M ⪯ I`, so that growth of its largest difference from `I` by more
    # than a fifth is rounding error; the previous iterate is returned.
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    z = (1 + root) / (2 * _norm_bound(a))
    tolerance = a.shape[-1] * jnp.finfo(a.dtype).eps

    def running(s: _Newton) -> jax.Array:
        better = (s.count <= 1) | (s.error <= 1.2 * s.best_error)
        return (s.count < MAX_ITERATIONS) & (s.error > tolerance) & better

    def newton_step(s: _Newton) -> _Newton:
        t = ((root + 1) * eye - s.m) / root  # Guo and Higham: T
        m = exact_product(_power(t, root), s.m)  # M
        m = (m + m.mT) / 2
        x = exact_product(s.x, t)
        return _Newton(x, m, magnitude(m - eye), s.x, s.error, s.count + 1)

    m = a * z
    x = eye * z ** (1 / root)
    error = magnitude(m - eye)
    start = _Newton(x, m, error, x, error, jnp.int32(0))
    end = while_at_most(MAX_ITERATIONS, running, newton_step, start)
    worse = (end.count > 1) & ~(end.error <= 1.2 * end.best_error)
    return jnp.where(worse, end.best, end.x)


def _newton_schulz(a: jax.Array, root: int, rows: Rows | None = None) -> jax.Array:
    """`a^(-1/2)` by coupled Newton-Schulz steps; with `rows`, by a step for each, unconverged."""
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    norm = _positive(safe_norm(a) if rows is None else schatten_norms(a, SPECTRAL)[0, 0])

    def polynomial(m: jax.Array, i: jax.Array) -> jax.Array:
        if rows is None:
            return (3 * eye - m) / 2  # Gong et al., B.8
        alike = len(set(rows)) == 1
        return _quadratic(rows[0] if alike else jnp.asarray(rows, a.dtype)[i], m)

    _, z = _square_roots(a / norm, polynomial, len(rows) if rows else NEWTON_SCHULZ_STEPS)
    return z / jnp.sqrt(norm)


def _by_products(a: jax.Array, root: int) -> jax.Array:
    """`a^(-1/root)` for `root` 2, 4, 8, … and condition numbers up to `1 / (8 eps)`."""
    norm = _norm_bound(a)
    # At most n^(1/8) times λ_max. A power iteration may be 10 % below it, where these diverge.
    bound = norm * _positive(safe_norm(_power(a / norm, 4)) ** 0.25)
    resolution = float(jnp.finfo(a.dtype).eps)
    y, z, condition, power = a / bound, a, 1 / (8 * resolution), 1
    while power < root:
        rows = jnp.asarray(square_root_rows(condition, resolution), a.dtype)
        y, z = _square_roots(y, lambda m, i, rows=rows: _quadratic(rows[i], m), len(rows))
        y, condition, power = (y + y.mT) / 2, condition**0.5, 2 * power
    return (z + z.mT) / 2 * bound ** (-1 / root)


def _quadratic(row: Any, m: jax.Array) -> jax.Array:
    """`a I + b m + c m²` with the coefficients `(a, b, c)`."""
    a, b, c = row
    return a * jnp.eye(m.shape[-1], dtype=m.dtype) + b * m + c * exact_product(m, m)


def _square_roots(
    a: jax.Array, polynomial: Callable[[jax.Array, jax.Array], jax.Array], steps: int
) -> tuple[jax.Array, jax.Array]:
    """`a^(1/2)` and `a^(-1/2)`, by steps `T = polynomial(ZY, i)`."""

    def coupled_step(i: jax.Array, yz: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, z = yz
        t = polynomial(exact_product(z, y), i)
        return exact_product(y, t), exact_product(t, z)  # Y and Z of Gong et al., B.8

    first = polynomial(a, jnp.int32(0))  # Z is the identity
    return jax.lax.fori_loop(1, steps, coupled_step, (exact_product(a, first), first))


def _norm_bound(a: jax.Array) -> jax.Array:
    """A bound of the largest eigenvalue, 1 for zeros; the Frobenius norm is often the tighter."""
    return _positive(jnp.minimum(jnp.max(jnp.sum(jnp.abs(a), axis=-1)), safe_norm(a)))


def _positive(x: jax.Array) -> jax.Array:
    """`x`, and 1 where it is not positive: what a division by it needs."""
    return jnp.where(x > 0, x, 1)


def _power(t: jax.Array, exponent: int) -> jax.Array:
    """`t^exponent`, for a power of 2."""
    for _ in range(exponent.bit_length() - 1):
        t = exact_product(t, t)
    return t


ITERATIONS = {
    "coupled_newton": _coupled_newton,
    "newton_schulz": _newton_schulz,
    "products": _by_products,
}


def root_by_iteration(
    a: jax.Array,
    root: int,
    damping: jax.Array,
    mode: str,
    floor: jax.typing.ArrayLike,
    method: str,
    rows: Rows | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`X = (a + damping · I)^(-1/root)` for `a (n, n)`, and `max |X^root (a + damping · I) - I|`.

    "relative" damping and the `floor`, for damping that is rounding noise, are multiples of the
    largest eigenvalue. With `rows` the root is what these steps of Newton-Schulz leave of it.
    """
    eye, largest = jnp.eye(a.shape[-1], dtype=a.dtype), power_iteration(a)
    added = damping * (largest if mode == "relative" else 1)
    noisy = (added > 0) & (added <= RESOLVED * jnp.finfo(a.dtype).eps * largest)
    a = a + jnp.where(noisy, jnp.maximum(added, floor * largest), added) * eye
    x = ITERATIONS[method](a, root) if rows is None else _newton_schulz(a, root, rows)
    return x, magnitude(exact_product(_power(x, root), a) - eye)
