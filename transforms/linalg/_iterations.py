r"""Inverse roots by iterations that use only matrix products, and the largest eigenvalue.

*Coupled Newton* (Schur-Newton; Guo and Higham, 2006), for $A_\epsilon = A + \epsilon I$ and $p \ge
1$:
$$M_0 = z A_\epsilon, \quad X_0 = z^{1/p} I, \quad T = \tfrac{(p+1) I - M}{p}, \quad
X \leftarrow X T, \quad M \leftarrow T^p M$$
with $z = (1 + p) / (2 \lambda)$, $\lambda \ge \lambda_{\max}$: $M \to I$ and $X \to
A_\epsilon^{-1/p}$. It stops when $\max |M - I|$ is below the tolerance, is not finite, or grows by
more than a fifth. From the second step on $M \preceq I$, whose largest difference from $I$ can only
fall, so growth is rounding error; the previous iterate is returned.

*Newton-Schulz*, for $p = 2$ (Gong et al., arXiv:2502.07752, B.8): $Y_0 = A_\epsilon /
\|A_\epsilon\|$, $Z_0 = I$, $T = (3I - ZY)/2$, $Y \leftarrow YT$, $Z \leftarrow TZ$; $Z /
\sqrt{\|A_\epsilon\|} \to A_\epsilon^{-1/2}$.

*Rank deficiency.* Both need damping: a zero eigenvalue has no inverse root, and one below
`eps(dtype) · λ_max` is not resolved. Without damping they diverge along the null space, where
rounding makes `M` look converged. The error estimate therefore uses the root itself, `max |X^p A_ε
- I|`. *Cost* per iteration, order `n`: `2n³ (1 + ⌈log₂ p⌉ + 1)` FLOPs (Newton), `6n³`
(Newton-Schulz). `eigh` is cheaper on a CPU; on a GPU it is expensive at large orders.

*Range.* The squares of the input must be in range; `solve_root` ensures it by scaling.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._validate import check_positive_int
from ._numerics import HIGHEST
from ._products import exact_product

MAX_ITERATIONS = 100


def power_iteration(a: jax.Array, iterations: int = 32) -> jax.Array:
    """Estimates the largest eigenvalue of symmetric positive semi-definite `a (n, n)` from below.

    Starts from the row sums of `|a|`, which have a component along the leading eigenvector unless
    it cancels exactly. The relative error of the Rayleigh quotient is about
    `(λ₂/λ₁)^(2·iterations)`. A zero matrix gives zero.

    Raises:
      ValueError: if `iterations` is not a positive integer.
    """
    check_positive_int("iterations", iterations, traced=True)

    def step(_: jax.Array, v: jax.Array) -> jax.Array:
        w = jnp.matmul(a, v, precision=HIGHEST)
        norm = jnp.linalg.norm(w)
        return jnp.where(norm > 0, w / jnp.where(norm > 0, norm, 1), v)

    scale = jnp.max(jnp.abs(a))
    a = a / jnp.where(scale > 0, scale, 1)
    start = jnp.sum(jnp.abs(a), axis=-1) + jnp.linspace(0.5, 1.0, a.shape[-1], dtype=a.dtype)
    v = jax.lax.fori_loop(0, iterations, step, start / jnp.linalg.norm(start))
    return scale * jnp.dot(v, jnp.matmul(a, v, precision=HIGHEST), precision=HIGHEST)


class _Newton(NamedTuple):
    """State of the coupled Newton iteration: the iterates, and the previous X (`best`)."""

    x: jax.Array
    m: jax.Array
    error: jax.Array
    best: jax.Array
    best_error: jax.Array
    count: jax.Array


def coupled_newton(
    a: jax.Array,
    root: int,
    damping: jax.typing.ArrayLike,
    *,
    relative: bool = False,
    floor: jax.typing.ArrayLike = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`X = (a + damping · I)^(-1/root)` for `a (n, n)`, and `max |X^root (a + damping · I) - I|`.

    With `relative` the damping is multiplied by the largest eigenvalue. Damping that is positive is
    at least `floor` times the largest eigenvalue.
    """
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    a = a + _damping(a, damping, relative, floor) * eye
    # Both norms bound the largest eigenvalue; the Frobenius norm is often the tighter bound.
    bound = jnp.minimum(jnp.max(jnp.sum(jnp.abs(a), axis=-1)), jnp.linalg.norm(a))
    bound = jnp.where(bound > 0, bound, 1)
    z = (1 + root) / (2 * bound)
    tolerance = a.shape[-1] * jnp.finfo(a.dtype).eps

    def running(s: _Newton) -> jax.Array:
        better = (s.count <= 1) | (s.error <= 1.2 * s.best_error)
        return (s.count < MAX_ITERATIONS) & (s.error > tolerance) & better

    def step(s: _Newton) -> _Newton:
        t = ((root + 1) * eye - s.m) / root
        m = exact_product(_power(t, root), s.m)
        m = (m + m.mT) / 2
        x = exact_product(s.x, t)
        return _Newton(x, m, jnp.max(jnp.abs(m - eye)), s.x, s.error, s.count + 1)

    m = a * z
    x = eye * z ** (1 / root)
    error = jnp.max(jnp.abs(m - eye))
    end = jax.lax.while_loop(running, step, _Newton(x, m, error, x, error, jnp.int32(0)))
    worse = (end.count > 1) & ~(end.error <= 1.2 * end.best_error)
    x = jnp.where(worse, end.best, end.x)
    return x, _residual(x, root, a)


def newton_schulz_root(
    a: jax.Array,
    damping: jax.typing.ArrayLike,
    *,
    relative: bool = False,
    floor: jax.typing.ArrayLike = 0.0,
    iterations: int = 40,
) -> tuple[jax.Array, jax.Array]:
    """`(a + damping · I)^(-1/2)` for `a (n, n)` and its error `max |X² (a + damping·I) - I|`."""
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    a = a + _damping(a, damping, relative, floor) * eye
    norm = jnp.linalg.norm(a)
    norm = jnp.where(norm > 0, norm, 1)

    def step(_: jax.Array, yz: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, z = yz
        t = (3 * eye - exact_product(z, y)) / 2
        return exact_product(y, t), exact_product(t, z)

    _, z = jax.lax.fori_loop(0, iterations, step, (a / norm, eye))
    x = z / jnp.sqrt(norm)
    return x, _residual(x, 2, a)


def _damping(
    a: jax.Array, damping: jax.typing.ArrayLike, relative: bool, floor: jax.typing.ArrayLike
) -> jax.Array:
    """What is added to the eigenvalues of `a`: 0, or at least `floor` times the largest of them."""
    largest = power_iteration(a)
    given = jnp.asarray(damping, a.dtype) * (largest if relative else 1)
    return jnp.where(given > 0, jnp.maximum(given, floor * largest), given)


def _residual(x: jax.Array, root: int, a: jax.Array) -> jax.Array:
    """`max |x^root a - I|`."""
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    return jnp.max(jnp.abs(exact_product(_power(x, root), a) - eye))


def _power(t: jax.Array, exponent: int) -> jax.Array:
    """`t^exponent` by repeated squaring."""
    result = None
    while exponent:
        if exponent % 2:
            result = t if result is None else exact_product(result, t)
        exponent //= 2
        if exponent:
            t = exact_product(t, t)
    assert result is not None
    return result
