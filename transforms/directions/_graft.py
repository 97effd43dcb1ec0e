r"""Grafting: the direction of one transformation with the length of another, per matrix.

$$D = \hat G\, \|T(G)\| \,/\, \|\hat G\|$$

for the direction $\hat G$ and the transformation $T$ that sets the length: the identity (norm
grafting; Li et al., 4-bit Shampoo, Algorithm 2 line 12; Anil et al., 2020) or Adam's direction
(Adam grafting; Nam and Ahn, arXiv:2606.02365, J.1).

*Numerics.* Frobenius norms per matrix in float32 at least, of sums of squares at two scales, one of
which neither underflows nor overflows for entries from 1e-30 to 1e30 (on CPUs of one sum, if it is
in range); if $\hat G$ is zero, $D$ is zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._trees import widened
from .._validate import check_matrices
from ..linalg._numerics import matrix_sums
from ..linalg._platforms import on_accelerators
from ..linalg._spread import is_shared


class GraftState(NamedTuple):
    """State of `graft`."""

    direction: Any
    length: Any


def graft(
    direction: optax.GradientTransformation, length: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Gives each matrix of `direction`'s updates the Frobenius norm of `length`'s.

    Args:
      direction: transformation of the gradient that gives the direction.
      length: transformation of the gradient that gives the norm, such as `optax.scale_by_adam()`
        (Adam grafting); `None` is the gradient itself (norm grafting).

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> muon_with_adams_length = curvax.graft(curvax.scale_by_muon(), optax.scale_by_adam())
    """
    length = optax.identity() if length is None else length
    for name, part in (("direction", direction), ("length", length)):
        if not isinstance(part, optax.GradientTransformation):
            raise ValueError(f"{name} must be an Optax transformation, got {part!r}.")

    def init(params: Any) -> GraftState:
        check_matrices(params, "graft")
        return GraftState(direction.init(params), length.init(widened(params)))

    def update(updates: Any, state: Any, params: Any = None):
        directions, direction_state = direction.update(updates, state.direction, params)
        # In bfloat16, Adam's second moment would stop changing.
        wide = None if params is None else widened(params)
        lengths, length_state = length.update(widened(updates), state.length, wide)
        return (
            jax.tree.map(rescaled, directions, lengths),
            GraftState(direction_state, length_state),
        )

    return optax.GradientTransformation(init, update)


def rescaled(x: jax.Array, like: jax.Array) -> jax.Array:
    """Rescales each matrix of `x (..., m, n)` to the norm of its match in `like`; 0 stays 0."""
    norm, target = _norm(x), _norm(like)
    factor = jnp.where(norm > 0, target / jnp.where(norm > 0, norm, 1), 0)
    return (x * factor).astype(x.dtype)


def shortened(x: jax.Array, longest: jax.typing.ArrayLike) -> jax.Array:
    """Rescales the matrices of `x (..., m, n)` that are longer than `longest (...)` to it."""
    norm = _norm(x)
    longest = jnp.broadcast_to(longest, x.shape[:-2])[..., None, None].astype(norm.dtype)
    return jnp.where(norm > longest, x * (longest / norm), x).astype(x.dtype)


def _norm(x: jax.Array) -> jax.Array:
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if is_shared():
        return _norm_at_any_scale(work)
    return on_accelerators(_norm_at_any_scale, _norm_on_a_cpu, work)


def _norm_on_a_cpu(x: jax.Array) -> jax.Array:
    """With one sum, if its squares are in range: XLA for CPUs computes all that each sum needs."""
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    usual = jnp.all((norm > 2.0**-30) & (norm < 2.0**60))
    return jax.lax.cond(usual, lambda x: norm, _norm_at_any_scale, x)


def _norm_at_any_scale(x: jax.Array) -> jax.Array:
    scales = (2.0**51, 2.0**-40)  # the first sum is finite for norms below 2^13
    sums = matrix_sums([jnp.square(x * scale) for scale in scales])
    of_small, of_large = (
        (jnp.sqrt(found) / scale)[..., None, None]
        for found, scale in zip(sums, scales, strict=True)
    )
    return jnp.where(of_small < 2.0**11, of_small, of_large)
