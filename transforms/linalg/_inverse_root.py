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

so that $\rho\,(d_{\max}/f)^{s/p} \le \|G\| / 320$: at most this share of the direction is noise.
Where $p = s$ and the damping is between the noise and $32 \sqrt n\,\mathrm{eps}\,d_{\max}$, the
formula itself raises the noise of a gradient of low rank; `kronecker/_roots.py` does better with
the eigenpairs that FOAM and DR-Shampoo keep. Iterations do not tell eigenvalues apart: they add $f$
if the damping is noise. They, and the cost of all methods, are in `_iterations.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees import widened
from .._validate import OneOf, checked
from ._coefficients import Rows
from ._eigh import eigh
from ._iterations import ITERATIONS, root_by_iteration
from ._loops import each_matrix
from ._numerics import EIGENVALUE_NOISE, RESOLVED, inexact, magnitude, power_of_two, ratio
from ._products import exact_product

SOLVERS = ("eigh", *ITERATIONS)
ROOTS: dict[str, tuple[str, Callable[[int], bool]]] = {
    "newton_schulz": ("2", lambda root: root == 2),
    "coupled_newton": ("a power of 2", lambda root: root & (root - 1) == 0),
    "products": ("2, 4, 8, …", lambda root: root > 1 and root & (root - 1) == 0),
}
"""Those of iterations."""

GRADIENT_NOISE = 0.1
"""Rounding of a gradient and of its products with roots, in `√n eps ‖G‖`; measured on gradients of
rank 1 and 4, of 24 × 16 to 256 × 128."""
DIRECTION_NOISE = 1 / 320
"""How much of a direction this noise may be. `tests/optimizers/test_rounding.py` measures it."""


def rounding_floor(statistic: jax.Array, root: jax.typing.ArrayLike, sides: int) -> jax.Array:
    """The value f over d_max, for a factor `(n, n)`; `root` p may be traced, `sides` is s."""
    eps = float(jnp.finfo(statistic.dtype).eps)
    noise = GRADIENT_NOISE * statistic.shape[-1] ** 0.5 * eps / DIRECTION_NOISE
    return jnp.maximum(EIGENVALUE_NOISE * eps, noise ** (root / sides)).astype(statistic.dtype)


def check_root_arguments(root: int, method: str, damping_mode: str) -> None:
    """Requires a method for this root and this damping mode."""
    OneOf(SOLVERS).check("method", method)
    allowed, has_root = ROOTS.get(method, ("", lambda root: True))
    if not has_root(root):
        raise ValueError(f"root must be {allowed} for method={method!r}, got {root!r}.")
    if method != "eigh" and damping_mode in ("floor", "outside"):
        raise ValueError(f"damping_mode={damping_mode!r} needs method='eigh', got {method!r}.")


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
    method: str,
    floor: jax.typing.ArrayLike = 0.0,
    rows: Rows | None = None,
) -> Solved:
    """The inverse root of one matrix `a (n, n)`, without argument checks.

    Rounding noise counts as `floor` times the largest eigenvalue (see `rounding_floor`). With
    `rows` of coefficients "newton_schulz" takes as many steps. Non-finite input gives NaN.
    """
    size = magnitude(a)
    by, damping, back = near_one(size, root, eps, damping_mode)  # squares stay in range
    arguments, indefinite = (a * by, root, damping, damping_mode, floor), jnp.bool_(False)
    if method == "eigh":
        x, error, indefinite = inverse_root_by_eigh(*arguments)
    else:
        x, error = root_by_iteration(*arguments, method, rows)
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
    method: str = "eigh",
) -> tuple[jax.Array, jax.Array]:
    """Inverse roots `(A + eps · I)^(-1/root)` of symmetric positive semi-definite matrices.

    The matrices of a batch are solved one after the other: temporaries do not grow with the batch.

    Args:
      a: `(..., n, n)`, symmetric; computed in float32 at least.
      root: p. "coupled_newton" requires a power of 2, "products" 2, 4, 8, …, "newton_schulz" 2.
      eps: damping.
      damping_mode: "absolute"; "relative": `eps` times the largest eigenvalue, which iterations
        estimate from below (0.4 % too small for Gaussian factors); or, with "eigh" only, "floor"
        (eigenvalues at least `eps`) or "outside" (`(A^(1/p) + eps · I)^(-1)`).
      method: "eigh"; or an iteration of products, which GPUs and TPUs prefer: "products" takes 30
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
    check_root_arguments(root, method, damping_mode)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must be square matrices (..., n, n), got shape {a.shape}.")
    a = inexact(a)
    solved = each_matrix(lambda x: solve_root(x, root, eps, damping_mode, method), widened(a))
    return solved.inverse_root.astype(a.dtype), solved.error


def root_eigenvalues(
    d: jax.Array,
    root: int,
    damping: jax.typing.ArrayLike,
    mode: str = "absolute",
    floor: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
    """The table above, for eigenvalues `d (..., n)`; noise counts as `floor` times the largest."""
    largest = jnp.max(d, axis=-1, keepdims=True)
    damping = jnp.asarray(damping, d.dtype)
    on_range = (damping > 0) | (d > d.shape[-1] * jnp.finfo(d.dtype).eps * largest)
    positive, largest = jnp.maximum(d, 0), jnp.maximum(largest, 0)
    noise = EIGENVALUE_NOISE * jnp.finfo(d.dtype).eps * largest
    unit = noise * (RESOLVED / EIGENVALUE_NOISE)
    least = floor * largest
    if mode == "outside":
        base = jnp.where(positive > 0, positive, 0) ** (1 / root) + damping
        unit, noise, least = (x ** (1 / root) for x in (unit, noise, least))
        added, power = damping, -1.0
    else:
        added = damping * largest if mode == "relative" else damping
        base = jnp.maximum(positive, damping) if mode == "floor" else positive + added
        power = -1 / root
    base = jnp.where((added > unit) | (base > noise), base, jnp.maximum(base, least))
    kept = on_range & (base > 0) | jnp.isnan(d)
    return jnp.where(kept, jnp.where(kept, base, 1) ** power, 0)


def inverse_root_by_eigh(
    a: jax.Array,
    root: int,
    damping: jax.typing.ArrayLike = 0.0,
    mode: str = "absolute",
    floor: jax.typing.ArrayLike = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`a^(-1/root)`, `‖A Q - Q diag(d)‖ / ‖A‖` (Frobenius), and whether `a (n, n)` is not ⪰ 0."""
    q, d = eigh(a)
    error = ratio(jnp.linalg.norm(exact_product(a, q) - q * d[None, :]), jnp.linalg.norm(a))
    x = exact_product(q * root_eigenvalues(d, root, damping, mode, floor)[None, :], q.mT)
    indefinite = jnp.min(d) < -len(d) * jnp.finfo(d.dtype).eps * jnp.max(jnp.abs(d))
    return x, error, indefinite
