r"""Orthogonalization: replaces each matrix by its polar factor.

$$D = U V^\top \quad\text{for}\quad G = U \Sigma V^\top$$

`linalg/_polar.py` has the methods, their cost and their numerics. `scale_by_shape` is Muon's scale,
which makes orthogonal directions of different shapes comparable:

| `consistent_rms` | factor | reference |
|---|---|---|
| `None` | $\sqrt{\max(1, n/m)}$ | Jordan et al., 2024 |
| `c` | $c\sqrt{\max(m, n)}$ | Liu et al., arXiv:2502.16982 |
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._trees import map_unzip
from .._validate import (
    check_bool,
    check_choice,
    check_dtype,
    check_interval,
    check_matrices,
    check_positive_int,
)
from ..linalg._polar import (
    NORMS,
    Coefficients,
    coefficient_rows,
    newton_schulz,
    polar_qdwh,
    polar_qr_svd,
    polar_svd,
)


class OrthogonalizeState(NamedTuple):
    """State of `orthogonalize` by a decomposition."""

    failures: Any  # failed decompositions, whose directions were zero, int32 (...) per leaf


def orthogonalize(
    method: str = "newton_schulz",
    *,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    eps: jax.typing.ArrayLike = 1e-8,
    norm: str = "frobenius",
    work_dtype: jax.typing.DTypeLike | None = None,
    adaptive: bool = False,
) -> optax.GradientTransformation:
    """Replaces each matrix `(..., m, n)` by its polar factor `U Vᵀ`.

    Args:
      method: "newton_schulz" (approximate, matrix products only), "svd" (exact; zero singular
        values stay zero), "qr_svd" (the same after a QR down to the smaller order, for long
        matrices) or "qdwh" (exact for full rank).
      coefficients: Newton-Schulz coefficients: "quintic" (Muon's), "classical", "polar_express",
        "turbo_muon", three numbers, or a row of three per iteration.
      steps: number of Newton-Schulz iterations.
      eps: added to the norm by which Newton-Schulz divides.
      norm: what Newton-Schulz divides by: "frobenius", "gram" or "aol", see `newton_schulz`.
      work_dtype: dtype of the Newton-Schulz iterations; `None` is that of the matrices.
      adaptive: whether to multiply the factor by its inner product with the matrix: the sum of the
        singular values, up to the error of the factor (Bernstein and Newhouse, arXiv:2409.20325).

    Returns:
      A transformation. With "newton_schulz" it is stateless. With the other methods the state
      counts failed decompositions, whose directions are zero.

    Raises:
      ValueError: if the method or the coefficients are unknown, if `steps < 1` or `eps < 0`, or if
        a leaf is not a matrix.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> transform = curvax.orthogonalize("svd")
      >>> grads = jnp.diag(jnp.array([3.0, 0.5]))
      >>> transform.update(grads, transform.init(grads))[0].round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    check_choice("method", method, ("newton_schulz", "svd", "qr_svd", "qdwh"))
    check_positive_int("steps", steps)
    check_interval("eps", eps, 0.0)
    check_choice("norm", norm, NORMS)
    if work_dtype is not None:
        check_dtype("work_dtype", work_dtype)
    check_bool("adaptive", adaptive)
    coefficient_rows(coefficients, steps)
    polar = {
        "newton_schulz": partial(
            newton_schulz,
            coefficients=coefficients,
            steps=steps,
            eps=eps,
            norm=norm,
            work_dtype=work_dtype,
        ),
        "svd": polar_svd,
        "qr_svd": polar_qr_svd,
        "qdwh": polar_qdwh,
    }[method]

    def init(params: Any) -> Any:
        check_matrices(params, "orthogonalize")
        if method == "newton_schulz":
            return optax.EmptyState()
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape[:-2], jnp.int32), params)
        return OrthogonalizeState(zeros)

    def checked(x: jax.Array, failures: jax.Array) -> tuple[jax.Array, jax.Array]:
        factor = polar(x)
        # A matrix that is not finite is not the decomposition's failure: it stays NaN.
        given, found = (jnp.isfinite(a).all(axis=(-2, -1)) for a in (x, factor))
        failed = given & ~found
        return jnp.where(failed[..., None, None], 0, factor), failures + failed

    def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
        return jnp.sum(x * factor, axis=(-2, -1), keepdims=True) * factor

    def update(updates: Any, state: Any, params: Any = None):
        del params
        if method == "newton_schulz":
            factors = jax.tree.map(polar, updates)
        else:
            factors, failures = map_unzip(2, checked, updates, state.failures)
            state = OrthogonalizeState(failures)
        return jax.tree.map(scaled, updates, factors) if adaptive else factors, state

    return optax.GradientTransformation(init, update)


def scale_by_shape(
    consistent_rms: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformation:
    r"""Scales matrices by a factor that depends only on their shape, as Muon does.

    Args:
      consistent_rms: `None` scales by $\sqrt{\max(1, n/m)}$ (Jordan et al.). A number `c` scales by
        $c\sqrt{\max(m, n)}$, which gives an orthogonal direction the root mean square `c` (Liu et
        al., arXiv:2502.16982; 0.2 matches AdamW's).

    Returns:
      A stateless transformation.
    """
    if consistent_rms is not None:
        check_interval("consistent_rms", consistent_rms, 0.0, open_low=True)

    def scaled(x: jax.Array) -> jax.Array:
        m, n = x.shape[-2:]
        if consistent_rms is None:
            factor = math.sqrt(max(1.0, n / m))
            return x if factor == 1.0 else x * factor
        return x * jnp.asarray(math.sqrt(max(m, n)) * consistent_rms, x.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(scaled, updates))
