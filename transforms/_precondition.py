r"""Kronecker-factored preconditioning: statistics, inverse roots, and their application.

For a gradient $G$ `(m, n)` and the matrix $M$ that is preconditioned ($G$ itself or its momentum):

$$L \leftarrow b_2 L + (1-b_2)\, S S^\top, \quad R \leftarrow b_2 R + (1-b_2)\, S^\top S, \quad
D = (L + \epsilon I)^{-1/p}\, M\, (R + \epsilon I)^{-1/p}$$

where $S$ is $G$ (or $M$), either factor may be absent, and the roots are computed at the steps that
the refresh policy names; between them the last roots stay in use. Before the first refresh a root
is the identity.

*Numerics.* Statistics and roots in float32 (float64 for float64 parameters), with
`Precision.HIGHEST` where a product feeds a root. Eigenvalues are clamped at 0; `eps = 0` takes
roots on the range only. A decomposition that comes back non-finite leaves the last root in place.
Cost of a factor of order `d` beside `k`: `2d²k` FLOPs for the statistic, `2d²k` for the product,
`O(d³)` at a refresh; `8d²` bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._inverse_root import HIGHEST, inverse_root_eigenvalues, map_spectrum
from ._refresh import Every
from ._trees import map_unzip
from ._validate import check_choice, check_decay, check_interval, check_matrices, check_positive_int


class Factor(NamedTuple):
    """One side's preconditioner of a batch of matrices; order `d` is `m` (left) or `n` (right)."""

    statistic: jax.Array  # L or R, (..., d, d)
    root: jax.Array  # the inverse root in use, (..., d, d)


class PreconditionState(NamedTuple):
    """State of `precondition`."""

    count: jax.Array  # t, int32 scalar
    left: Any  # a Factor, or None, for every leaf
    right: Any  # the same for the right side
    momentum: Any  # state of the transformation that gives M


def precondition(
    momentum: optax.GradientTransformation | None = None,
    *,
    refresh: Every,
    sides: str = "both",
    square: str = "left",
    root: int = 4,
    b2: jax.typing.ArrayLike | None = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_outside: bool = False,
    statistics: str = "gradient",
) -> optax.GradientTransformation:
    """Preconditions matrices by inverse roots of their Kronecker factors.

    Args:
      momentum: transformation of the gradient that gives the preconditioned `M`; `None` is `M = G`.
      refresh: policy for the roots, for example `every(10)`.
      sides: "both", "left", "right", or "smaller": the factor of the smaller order alone.
      square: side that "smaller" takes for square matrices, "left" or "right".
      root: p, of the inverse p-th root.
      b2: decay rate of the statistics, which start at 0 and are not bias-corrected; `None` sums.
      eps: damping, absolute. 0 takes the root on the factor's range only.
      eps_outside: whether the damping is added to `L^(1/p)` instead of `L`.
      statistics: "gradient" or "momentum": what the statistics are formed from.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: naming an argument outside its range, or a leaf that is no matrix.
    """
    check_choice("sides", sides, ("both", "left", "right", "smaller"))
    check_choice("square", square, ("left", "right"))
    check_choice("statistics", statistics, ("gradient", "momentum"))
    check_positive_int("root", root)
    check_interval("eps", eps, 0.0)
    if b2 is not None:
        check_decay("b2", b2)
    average = optax.identity() if momentum is None else momentum

    def has(side: str, x: jax.Array) -> bool:
        m, n = x.shape[-2:]
        smaller = square if m == n else ("left" if m < n else "right")
        return sides in ("both", side) or (sides == "smaller" and smaller == side)

    def init(params: Any) -> PreconditionState:
        check_matrices(params, "precondition")

        def factor(side: str, x: jax.Array) -> Factor | None:
            if not has(side, x):
                return None
            order = x.shape[-2] if side == "left" else x.shape[-1]
            shape = (*x.shape[:-2], order, order)
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            return Factor(
                jnp.zeros(shape, dtype), jnp.broadcast_to(jnp.eye(order, dtype=dtype), shape)
            )

        return PreconditionState(
            count=jnp.zeros([], jnp.int32),
            left=jax.tree.map(lambda x: factor("left", x), params),
            right=jax.tree.map(lambda x: factor("right", x), params),
            momentum=average.init(params),
        )

    def update(updates: Any, state: Any, params: Any = None):
        count: Any = optax.safe_increment(state.count)
        matrices, momentum_state = average.update(updates, state.momentum, params)
        source = updates if statistics == "gradient" else matrices

        def accumulate(s: jax.Array, left: Factor | None, right: Factor | None):
            return _accumulate(s, left, b2), _accumulate(s.mT, right, b2)

        factors = map_unzip(2, accumulate, source, state.left, state.right)
        left, right = jax.lax.cond(refresh.due(count), refreshed, lambda same: same, factors)
        (directions,) = map_unzip(1, _applied, matrices, left, right)
        return directions, PreconditionState(count, left, right, momentum_state)

    def refreshed(factors: Any) -> Any:
        def root_of(factor: Factor) -> Factor:
            new = map_spectrum(
                factor.statistic,
                lambda d: inverse_root_eigenvalues(d, root, eps, damping_outside=eps_outside),
            )
            good = jnp.isfinite(new).all(axis=(-2, -1), keepdims=True)
            return factor._replace(root=jnp.where(good, new, factor.root))

        return jax.tree.map(root_of, factors, is_leaf=lambda x: isinstance(x, Factor))

    return optax.GradientTransformation(init, update)


def _accumulate(
    s: jax.Array, factor: Factor | None, b2: jax.typing.ArrayLike | None
) -> Factor | None:
    """The factor with `s sᵀ` taken into its statistic."""
    if factor is None:
        return None
    s = s.astype(factor.statistic.dtype)
    gram = jnp.matmul(s, s.mT, precision=HIGHEST)
    old = factor.statistic
    return factor._replace(statistic=old + gram if b2 is None else b2 * old + (1 - b2) * gram)


def _applied(m: jax.Array, left: Factor | None, right: Factor | None) -> tuple[jax.Array]:
    """`L^(-1/p) m R^(-1/p)`, in the dtype of `m`."""
    x = m
    if left is not None:
        x = left.root @ x.astype(left.root.dtype)
    if right is not None:
        x = x.astype(right.root.dtype) @ right.root
    return (x.astype(m.dtype),)
