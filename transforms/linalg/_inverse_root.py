r"""Inverse roots of symmetric positive semi-definite matrices.

$A^{-1/p}$ with damping $\epsilon$: with $A = Q\,\mathrm{diag}(d)\,Q^\top$ the root is
$Q\,\mathrm{diag}(r)\,Q^\top$ with

| damping mode | $r$ |
|---|---|
| "absolute" | $(\max(d, 0) + \epsilon)^{-1/p}$ |
| "relative" | $(\max(d, 0) + \epsilon\,d_{\max})^{-1/p}$ |
| "floor" | $\max(d, \epsilon)^{-1/p}$ |
| "outside" | $(\max(d, 0)^{1/p} + \epsilon)^{-1}$ |

With $\epsilon = 0$ the root is taken on the range of $A$ only: eigenvalues up to
`order · eps(dtype) · d_max` are rounding noise and give 0.

*Rounding noise.* Rounding moves an eigenvalue by up to $0.7\,\mathrm{eps}\,d_{\max}$. It also
leaves $\rho = 0.1 \sqrt n\,\mathrm{eps}\,\|G\|$ outside the singular vectors of a gradient of low
rank, which each of $s$ sides raises over the gradient by $(d_{\max}/f)^{1/p}$ if it roots $f$
there. Roots that multiply gradients therefore take a damped eigenvalue of up to
$8\,\mathrm{eps}\,d_{\max}$, which is noise unless the damping alone is above $2\,\mathrm{eps}\,
d_{\max}$, for

$$f = d_{\max} \max\big(8\,\mathrm{eps},\ (32 \sqrt n\,\mathrm{eps})^{p/s}\big)$$

so that $\rho\,(d_{\max}/f)^{s/p} \le \|G\| / 320$: at most this share of the direction is noise. At
order 1024 $f$ is `1e-4 d_max` in float32 for `p = s` and `1e-6 d_max` for `p = 2s` (Shampoo, ASGO);
2e-13 and 2e-15 in float64. Damped eigenvalues above the noise are rooted as they are, so a stale
root is also right in directions that are new. Where $p = s$ and $\epsilon$ is between the noise and
$32 \sqrt n\,\mathrm{eps}\,d_{\max}$, the formula itself raises the noise of a gradient of low rank,
to $\rho\,d_{\max}/\epsilon$ of the direction: `kronecker/_noise.py` does better with the eigenpairs
that FOAM and DR-Shampoo keep. The iterations do not tell eigenvalues apart: they add $f$ if the
damping is noise. No float32 floor can tell the noise of a gradient in bfloat16 from a gradient.

*Cost*: one symmetric eigendecomposition, 14 times a matrix product of the same order on a CPU
(order 512; `docs/performance.md`). The iterative solvers are in `_iterations.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._validate import OneOf, checked
from ._eigh import eigh, from_eigen, is_indefinite
from ._iterations import ITERATIONS, Rows, root_by_iteration
from ._loops import each_matrix
from ._numerics import EIGENVALUE_NOISE, RESOLVED, inexact, magnitude, power_of_two
from ._products import exact_product

SOLVERS = ("eigh", *ITERATIONS)

GRADIENT_NOISE = 0.1
"""Rounding of a gradient and of its products with roots, in `√n eps ‖G‖`; measured on gradients of
rank 1 and 4, of 24 × 16 to 256 × 128."""
DIRECTION_NOISE = 1 / 320
"""How much of a direction this noise may be. `tests/optimizers/test_rounding.py` measures it."""


def rounding_floor(statistic: jax.Array, root: jax.typing.ArrayLike, sides: int) -> jax.Array:
    """The value f for noise of a factor `(n, n)`, over its largest eigenvalue; see above.

    `root` is p, which may be traced, and `sides` is s.
    """
    eps = float(jnp.finfo(statistic.dtype).eps)
    noise = GRADIENT_NOISE * statistic.shape[-1] ** 0.5 * eps / DIRECTION_NOISE
    return jnp.maximum(EIGENVALUE_NOISE * eps, noise ** (root / sides)).astype(statistic.dtype)


def check_root_arguments(
    root: int, solver: str, damping_mode: str, argument: str = "solver"
) -> None:
    """Raises a `ValueError` if the solver does not support this root or this damping mode."""
    OneOf(SOLVERS).check(argument, solver)
    if solver == "newton_schulz" and root != 2:
        raise ValueError(f"root must be 2 for {argument}='newton_schulz', got {root!r}.")
    if solver == "coupled_newton" and root & (root - 1):
        raise ValueError(
            f"root must be a power of 2 for {argument}='coupled_newton', got {root!r}."
        )
    if solver == "products" and (root < 2 or root & (root - 1)):
        raise ValueError(f"root must be 2, 4, 8, … for {argument}='products', got {root!r}.")
    if solver != "eigh" and damping_mode in ("floor", "outside"):
        raise ValueError(f"damping_mode={damping_mode!r} needs {argument}='eigh', got {solver!r}.")


class Solved(NamedTuple):
    """The inverse root of one matrix."""

    inverse_root: jax.Array  # (n, n)
    error: jax.Array  # the error estimate of `inverse_root`
    indefinite: jax.Array  # whether an eigenvalue is negative; always False for the iterations


def solve_root(
    a: jax.Array,
    root: int,
    eps: jax.typing.ArrayLike,
    damping_mode: str,
    solver: str,
    floor: jax.typing.ArrayLike = 0.0,
    rows: Rows | None = None,
) -> Solved:
    """The inverse root of one matrix `a (n, n)`, without argument checks.

    Rounding noise counts as `floor` times the largest eigenvalue (see `rounding_floor`). With
    `rows` of coefficients "newton_schulz" takes as many steps. Non-finite input gives NaN.
    """
    size = magnitude(a)
    by, damping, back = near_one(size, root, eps, damping_mode)  # squares stay in range
    a, indefinite = a * by, jnp.bool_(False)
    if solver == "eigh":
        x, error, indefinite = inverse_root_by_eigh(a, root, damping, damping_mode, floor)
    else:
        relative = damping_mode == "relative"
        x, error = root_by_iteration(
            a, root, damping, solver, relative=relative, floor=floor, rows=rows
        )
    finite = jnp.isfinite(size)
    x = jnp.where(finite, x * back, jnp.nan)
    return Solved(x, jnp.where(finite, error, jnp.nan), indefinite)


class NearOne(NamedTuple):
    """How to scale a matrix so that its largest entry is near 1, by powers of two: exactly."""

    by: jax.Array  # the matrix and its eigenvalues: 2^(-root · multiple), at most 2^126
    eps: jax.Array  # the damping then
    back: jax.Array  # for the root


def near_one(largest: jax.Array, root: Any, eps: jax.typing.ArrayLike, mode: str) -> NearOne:
    """The scales for matrices whose `largest` entries or eigenvalues are these."""
    multiple = jnp.maximum(power_of_two(largest) // root, -(126 // root))
    one = jnp.ones((), largest.dtype)
    by, back = jnp.ldexp(one, -root * multiple), jnp.ldexp(one, -multiple)
    damping = jnp.asarray(eps, largest.dtype)
    if mode == "outside":
        damping = damping * back
    elif mode != "relative":
        # Positive damping must not underflow to 0: that would take the root on the range only.
        least = jnp.finfo(largest.dtype).tiny
        damping = jnp.where(damping > 0, jnp.maximum(damping * by, least), 0)
    return NearOne(by, damping, back)


@checked
def inverse_root(
    a: jax.Array,
    root: int = 2,
    eps: jax.typing.ArrayLike = 0.0,
    *,
    damping_mode: str = "absolute",
    solver: str = "eigh",
) -> tuple[jax.Array, jax.Array]:
    """Inverse roots `(A + eps · I)^(-1/root)` of symmetric positive semi-definite matrices.

    The matrices of a batch are solved one after the other: temporaries do not grow with the batch.

    Args:
      a: `(..., n, n)`, symmetric; computed in float32 at least.
      root: p. "coupled_newton" requires a power of 2, "products" 2, 4, 8, …, "newton_schulz" 2.
      eps: damping.
      damping_mode: "absolute"; "relative": `eps` times the largest eigenvalue; or, with "eigh"
        only, "floor" (eigenvalues at least `eps`) or "outside" (`(A^(1/p) + eps · I)^(-1)`).
      solver: "eigh"; or an iteration of products, which GPUs and TPUs prefer: "products" takes 30
        of them for p = 2 and 49 for p = 4, "coupled_newton" as many as the matrix needs (63 to 76
        at a condition number of 1e6), "newton_schulz" 120. With `eps = 0` a rank-deficient matrix
        has a root on its range only, which "eigh" returns; the iterations do not converge.

    Returns:
      The roots, like `a`, and an error estimate per matrix, `(...)`: for "eigh" the relative
      residual of the decomposition, for the iterations `max |X^p (A + eps · I) - I|`.

    Raises:
      ValueError: if an argument is not allowed; the message names it.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> root, error = curvax.inverse_root(jnp.diag(jnp.array([4.0, 0.25])))
      >>> root.tolist()
      [[0.5, 0.0], [0.0, 2.0]]
    """
    check_root_arguments(root, solver, damping_mode)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must be square matrices (..., n, n), got shape {a.shape}.")
    a = inexact(a)
    work = a.astype(np.promote_types(a.dtype, np.float32))
    solved = each_matrix(lambda x: solve_root(x, root, eps, damping_mode, solver), work)
    return solved.inverse_root.astype(a.dtype), solved.error


def root_eigenvalues(
    d: jax.Array,
    root: int,
    damping: jax.typing.ArrayLike,
    mode: str = "absolute",
    floor: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
    """Eigenvalues of the inverse root for eigenvalues `d (..., n)`; see the table above.

    Rounding noise counts as `floor` times the largest eigenvalue.
    """
    largest = jnp.max(d, axis=-1, keepdims=True)
    damping = jnp.asarray(damping, d.dtype)
    on_range = (damping > 0) | (d > d.shape[-1] * jnp.finfo(d.dtype).eps * largest)
    positive = jnp.maximum(d, 0)
    noise = EIGENVALUE_NOISE * jnp.finfo(d.dtype).eps * jnp.maximum(largest, 0)
    unit = noise * (RESOLVED / EIGENVALUE_NOISE)
    least = floor * jnp.maximum(largest, 0)
    if mode == "outside":
        base = jnp.where(positive > 0, positive, 0) ** (1 / root) + damping
        unit, noise, least = (x ** (1 / root) for x in (unit, noise, least))
        resolved = damping > unit
        power = -1.0
    else:
        added = damping * jnp.maximum(largest, 0) if mode == "relative" else damping
        base = jnp.maximum(positive, damping) if mode == "floor" else positive + added
        resolved = added > unit
        power = -1 / root
    base = jnp.where(resolved | (base > noise), base, jnp.maximum(base, least))
    kept = on_range & (base > 0) | jnp.isnan(d)
    return jnp.where(kept, jnp.where(kept, base, 1) ** power, 0)


def inverse_root_by_eigh(
    a: jax.Array,
    root: int,
    damping: jax.typing.ArrayLike = 0.0,
    mode: str = "absolute",
    floor: jax.typing.ArrayLike = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`a^(-1/root)` for `a (n, n)`, an error estimate, and whether `a` is indefinite.

    The estimate is `‖A Q - Q diag(d)‖ / ‖A‖` (Frobenius): a backward error, a few times eps(dtype).
    """
    q, d = eigh(a)
    residual = jnp.linalg.norm(exact_product(a, q) - q * d[None, :])
    norm = jnp.linalg.norm(a)
    error = jnp.where(norm > 0, residual / jnp.where(norm > 0, norm, 1), 0)
    return from_eigen(q, root_eigenvalues(d, root, damping, mode, floor)), error, is_indefinite(d)
