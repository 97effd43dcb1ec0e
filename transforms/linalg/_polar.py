r"""The polar factor $U V^\top$ of $X = U \Sigma V^\top$: exactly, or by Newton-Schulz iteration.

| function | cost for `m × n`, `m ≤ n` | rank-deficient `X` |
|---|---|---|
| `polar_svd` | one thin SVD, `O(m²n)` | zero singular values stay zero |
| `polar_qr_svd` | a QR and an SVD of order `m`, `O(m²n)` | the same |
| both on TPUs and GPUs | 13 rounds of `4m²n + 2m³` FLOPs (`_by_products.py`) | the same |
| `polar_qdwh` | at most 6 QR or Cholesky steps, `O(m²n)` | null space filled arbitrarily |
| `polar_qdwh` on TPUs and GPUs | 16 rounds of `4m²n + 2m³` FLOPs | filled, lengths up to 1 |
| `newton_schulz` | 5 steps: `20m²n + 10m³` FLOPs; if `n ≥ 2m`, `8m²n + 28m³` | as `polar_svd` |

Newton-Schulz: $X \leftarrow aX + (bA + cA^2)X$, $A = XX^\top$, from $X / (\|X\|_F + \epsilon)$, on
the transpose if $m > n$. An iteration maps each singular value by $p(\sigma) = a\sigma + b\sigma^3
+ c\sigma^5$ and leaves the singular vectors alone.

*Numerics.* Newton-Schulz works in the dtype of `X` or in `work_dtype`, and amplifies rounding
errors in the null space; the others work in float32 at least, one matrix after the other. A zero
matrix gives zero, a non-finite one NaN. If `n ≥ 2m`, three iterations at a time share their
products with `X`: they iterate on its Gram matrix, which is then computed anew (Gram Newton-Schulz,
Zhang et al., 2026). Without this restart the error of five iterations in bfloat16 is above 1; with
it, it is that of one iteration at a time (`tests/linalg/test_polar.py`).

*Several devices.* Inside `shard_map` the devices of `axis_name` divide products
(`_by_products.py`); on CPUs each device does all methods but Newton-Schulz in full.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._side import side_of
from .._trees import widened
from ._by_products import UNROLLED, AxisName, Split, polar_by_products
from ._coefficients import Coefficients, coefficient_rows
from ._loops import each_matrix, in_turn
from ._numerics import inexact, power_of_two, safe_norm, safe_root, to_one
from ._platforms import by_platform
from ._products import exact_product, gram


def newton_schulz(
    x: jax.Array,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    eps: jax.typing.ArrayLike = 1e-8,
    norm: str = "frobenius",
    work_dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Approximates the polar factor of `x (..., m, n)` by `steps` Newton-Schulz iterations.

    Args:
      x: a batch of matrices.
      coefficients: a name in `NEWTON_SCHULZ_COEFFICIENTS`, three numbers `(a, b, c)`, or one row
        of three per iteration (the last one repeats).
      steps: number of iterations.
      eps: added to the norm that divides `x`.
      norm: the norm that divides `x`: "frobenius"; "gram": the square root of the Frobenius norm of
        `x xᵀ` (the Schatten 4-norm), which is closer to the largest singular value; or "aol": a
        number per row (column, if `m > n`), the root of the sum of the magnitudes in this row of
        the Gram matrix. It starts closest to orthogonal and saves about one iteration; the result
        is the polar factor of the scaled rows, which are near `x` where rows are alike.
      work_dtype: dtype of the iterations, such as bfloat16 or float16; `None` is that of `x`.
      axis_name: the axis or axes of the enclosing `shard_map` (with `check_vma=False`) whose
        devices have the same `x` and divide the work, if their number divides the longer side. All
        get the whole result.

    Returns:
      An array like `x`.

    References:
      "aol": Boissin et al., `Turbo-Muon <https://arxiv.org/abs/2512.04632>`_, 2025.
    """
    rows, x = coefficient_rows(coefficients, steps), inexact(x)
    work, dtype = jnp.dtype(x.dtype if work_dtype is None else work_dtype), x.dtype
    # Three at a time if that is less work; the rounding errors of more grow too fast in the product
    # of the `B`s.
    at_once = 3 if max(x.shape[-2:]) >= 2 * min(x.shape[-2:]) else 1
    table, side = jnp.asarray(rows, work), side_of("smaller", x)
    split = Split.of(x, side.other_axis, axis_name)

    def more(x: jax.Array, done: Any, count: int) -> jax.Array:
        """`x` after more iterations, with two products with `x` in total."""
        used_rows = [rows[0] if len(set(rows)) == 1 else table[done + j] for j in range(count)]
        return side.times(_polynomial(split.summed(gram(x, side)), used_rows, split), x)

    def approximated(x: jax.Array) -> jax.Array:
        x = _first_iterations(x, rows[:at_once], eps, norm, work, split)
        whole, rest = divmod(max(0, len(rows) - at_once), at_once)
        iterate = lambda i, x: more(x, at_once * (i + 1), at_once)  # noqa: E731
        x = jax.lax.fori_loop(0, whole, iterate, x, unroll=UNROLLED)
        x = more(x, len(rows) - rest, rest) if rest else x
        return split.gathered(x).astype(dtype)

    return in_turn(approximated, x)


def _first_iterations(
    x: jax.Array,
    rows: Sequence[Any],
    eps: jax.typing.ArrayLike,
    kind: str,
    dtype: Any,
    split: Split,
) -> jax.Array:
    """Iterations from `x / (‖x‖ + eps)` in `dtype`, for entries of any size; zero stays zero.

    `x` itself is only scaled by a power of two: its norm ("aol": one per row) divides its Gram
    matrix and the product of the `B`s. Takes all of `x`, returns the device's part.
    """
    exponent = power_of_two(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    side, part = side_of("smaller", x), widened(split.device_part(x))
    wide = part.dtype
    near_one = (part * jnp.ldexp(jnp.ones(exponent.shape, wide), -exponent)).astype(dtype)
    squared = split.summed(gram(near_one, side, dtype=wide))
    if kind == "aol":
        square = jnp.sum(jnp.abs(squared), axis=-1, keepdims=True)
    elif kind == "gram":
        square = safe_norm(squared, axis=(-2, -1), keepdims=True)
    else:
        square = jnp.diagonal(squared, axis1=-2, axis2=-1).sum(axis=-1)[..., None, None]
    norm = safe_root(square) + jnp.ldexp(jnp.asarray(eps, wide), -exponent)
    inverse = jnp.where(square == 0, 0, 1 / jnp.where(square == 0, 1, norm))
    factor = _polynomial((squared * inverse * inverse.mT).astype(dtype), rows, split)
    return side.times((factor.astype(wide) * side.as_rows(inverse.mT)).astype(dtype), near_one)


def _polynomial(square: jax.Array, rows: Sequence[Any], split: Split) -> jax.Array:
    """The product of the `B`s of iterations, from the Gram matrix `A (..., m, m)` before them."""
    # An iteration is `X ← BX` with `B = aI + bA + cA²`, so `A` becomes `BAB`.
    eye = jnp.broadcast_to(jnp.eye(square.shape[-1], dtype=square.dtype), square.shape)
    product = factor = None
    for a, b, c in rows:
        if factor is not None:
            square = split.reduce(jnp.matmul, (factor, square, factor))
        factor = a * eye + b * square + c * split.reduce(jnp.matmul, (square, square))
        product = factor if product is None else split.reduce(jnp.matmul, (factor, product))
    assert product is not None
    return product


def polar_svd(x: jax.Array, size: int | None = None, axis_name: AxisName = None) -> jax.Array:
    """The polar factor `U Vᵀ` of `x (..., m, n)` by SVD, on the range of `x` only.

    Singular values up to `size · eps · σ_max` count as zero and stay zero; `size` is `max(m, n)`.
    On TPUs and GPUs by products alone, which devices divide as in `newton_schulz`.
    """
    return _on_range(_by_svd, x, size or max(x.shape[-2:]), axis_name)


def polar_qr_svd(x: jax.Array, axis_name: AxisName = None) -> jax.Array:
    """Like `polar_svd`, on CPUs after a QR decomposition: the SVD has only the smaller order."""
    return _on_range(_by_qr_svd, x, max(x.shape[-2:]), axis_name)


def _on_range(
    by_lapack: Callable[[jax.Array, int], jax.Array], x: jax.Array, size: int, axis_name: AxisName
) -> jax.Array:
    """The polar factor on the range of `x`, with a derivative of 0 at matrices of zeros."""

    def by_products(x: jax.Array) -> jax.Array:
        near_one, finite = _scaled_or_zero(widened(x))
        polar = polar_by_products(near_one, axis_name, size)
        return jnp.where(finite, polar, jnp.nan).astype(x.dtype)

    def elsewhere(x: jax.Array) -> jax.Array:
        some = jnp.any(x != 0, axis=(-2, -1), keepdims=True)
        *_, m, n = x.shape  # decompositions of zeros have no derivative
        sound = jnp.eye(m, n, dtype=x.dtype) * jnp.arange(1, n + 1, dtype=x.dtype)[None]
        polar = by_lapack(jnp.where(some, x, jnp.broadcast_to(sound, x.shape)), size)
        return jnp.where(some, polar, 0)

    return by_platform(gpu=by_products, tpu=by_products, default=elsewhere)(inexact(x))


def _scaled_or_zero(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` scaled by a power of two, zero where not all of a matrix is finite; and where it is."""
    finite = jnp.isfinite(x).all(axis=(-2, -1), keepdims=True)
    sound = jnp.where(finite, x, 0)
    return sound * to_one(jnp.max(jnp.abs(sound), axis=(-2, -1), keepdims=True)), finite


def _by_svd(x: jax.Array, size: int) -> jax.Array:
    # LAPACK's SVD may hang on an infinite entry, and its rounding depends on the input's scale.
    near_one, finite = _scaled_or_zero(widened(x))
    u, s, vt = each_matrix(lambda a: tuple(jnp.linalg.svd(a, full_matrices=False)), near_one)
    kept = s > size * jnp.finfo(s.dtype).eps * s[..., :1]
    u = jnp.where(finite, u * kept.astype(u.dtype)[..., None, :], jnp.nan)
    return exact_product(u, vt).astype(x.dtype)


def _by_qr_svd(x: jax.Array, size: int) -> jax.Array:
    wide = x.shape[-2] < x.shape[-1]
    work = widened(x)
    q, r = each_matrix(lambda a: tuple(jnp.linalg.qr(a)), work.mT if wide else work)
    # The cutoff of the singular values follows the size of `x`, not of its small factor.
    polar = exact_product(q, _by_svd(r, size))
    return (polar.mT if wide else polar).astype(x.dtype)


def polar_qdwh(x: jax.Array, axis_name: AxisName = None) -> jax.Array:
    """The polar factor of `x (..., m, n)` of full rank: by QDWH, or by products (see above)."""
    x = inexact(x)
    wide = x.shape[-2] < x.shape[-1]

    def one(a: jax.Array) -> jax.Array:
        unitary = jax.scipy.linalg.polar(a.T if wide else a, method="qdwh")[0]
        return unitary.T if wide else unitary

    by_products = partial(polar_by_products, axis_name=axis_name)
    by_qdwh = partial(each_matrix, one)
    polar = by_platform(gpu=by_products, tpu=by_products, default=by_qdwh)(widened(x))
    return polar.astype(x.dtype)
