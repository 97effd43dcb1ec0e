r"""Transformations that run on gradients projected to low-rank subspaces.

For a gradient $G$ `(m, n)` whose rows are projected, the basis $U$ `(m, r)` of its last refresh and
any transformation $f$,

$$\sigma = U^\top G, \qquad \Delta = f(\sigma), \qquad D = U \Delta + C$$

with a compensation $C$ of the residual outside the subspace (`_compensation.py`), or $C = 0$. The
right side is the transpose: $U$ `(n, r)`, $\sigma = G U$ `(m, r)`. Before the first refresh $U$ is
the first `r` columns of the identity. A refresh precedes the projection of its step.

*Tracking.* $\tilde Q \leftarrow b_3 \tilde Q + (1-b_3)\,\sigma\sigma^\top$ `(r, r)` accumulates the
energies within the subspace for the next basis (`_bases.py`). A rule (`_carry.py`) carries the
*moments* of $f$ over to a new basis, and $\tilde Q$ as a first moment on both sides.

*Numerics.* Everything in float32 at least, bases in `Precision.HIGHEST`. A gradient counts as zero,
and `skipped` counts it, if the sum of squares of its projection is not finite. A basis that is not
finite is rejected: the last one stays, and `rejected` counts it. All-zero gradients produce no
basis. A matrix without a first basis tries again at every step. If a basis in use, a direction
inside the subspace or a scale outside is not finite, the state is damaged: the matrix does not
move, and its state starts anew at the next step (`restarted`). A tracked second moment that is
damaged starts anew at a refresh.
*Random draws* of a refresh use the key `fold_in(key, refreshes)` of its matrix. *Cost*: `4mnr`
FLOPs between refreshes, `2r²n` more with tracking, one more pass over `G` with a compensation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._counts import next_step
from .._keys import matrix_keys
from .._restart import flagged, restarted
from .._trees import map_unzip, widened
from .._validate import (
    check_bool,
    check_choice,
    check_decay,
    check_matrices,
    check_positive_int,
    shown,
)
from ..directions._carry import Carry, find_moments, keep
from ..refresh._policy import RefreshPolicy, check_refresh
from ._bases import BasisFinder, check_finder
from ._compensation import Compensation, check_compensation
from ._rank import check_ranks
from ._rule import SubspaceRule

SIDES = ("smaller", "larger", "left", "right", "std")


class SubspaceState(NamedTuple):
    """State of `in_subspace`."""

    count: jax.Array  # t, int32 scalar
    subspaces: Any  # a Subspace per leaf
    inner: Any  # state of the inner transformation, for the projected matrices


def in_subspace(
    inner: optax.GradientTransformation,
    rank: int,
    *,
    basis: BasisFinder,
    refresh: RefreshPolicy,
    carry: Carry | None = None,
    compensation: Compensation | None = None,
    tracking: bool = False,
    b3: jax.typing.ArrayLike = 0.999,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Runs a transformation on gradients projected to a subspace of rank `rank`.

    Args:
      inner: a transformation of the projected matrices, such as `optax.scale_by_adam()`. It gets no
        parameters. A transformation that takes the norm of a tree would mix matrices; use
        `limit_norm_growth`, `graft` and `orthogonalize`, which work per matrix.
      rank: dimension of the subspaces.
      basis: the basis finder, a value of `curvax.subspaces`, such as `svd()`.
      refresh: policy for the bases: `every(k)`, `policies.below_norm(threshold)`, or your own.
      carry: how moments follow a change of basis: `subspaces.keep()` (the default), `rotate()` or
        `reset()`.
      compensation: how the residual of the gradient is used: `None` (not at all),
        `subspaces.optimal()`, `fira()`, `fira_plus()` or `channel_scaling()`.
      tracking: whether to accumulate the energies within the subspace for the next basis.
      b3: decay rate of the tracked second moment.
      side: the projected side: "smaller" or "larger" of the two orders (left if they are equal),
        "left" (rows), "right" (columns), or "std" (the smaller, right if they are equal).
      clamp_rank: `True` clamps the rank to `min(m, n)`, and `leading` to the nearest value that a
        switched basis allows; `summarize` shows it. `False` makes both an error.
      seed: seed of all random draws.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: naming an argument outside its range, or a leaf that is not a matrix.

    Example:
      >>> import curvax, optax
      >>> low_rank_lion = curvax.in_subspace(
      ...     optax.scale_by_lion(),
      ...     128,
      ...     basis=curvax.subspaces.randomized(),
      ...     refresh=curvax.every(200),
      ...     carry=curvax.subspaces.rotate(),
      ... )
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an Optax transformation, got {inner!r}.")
    carry = keep() if carry is None else carry
    check_positive_int("rank", rank)
    check_finder("basis", basis)
    check_refresh(refresh, ("projection",))
    check_compensation(compensation)
    if not isinstance(carry, Carry) or callable(carry):
        raise ValueError(
            f"carry must be a value such as curvax.subspaces.rotate(), got {shown(carry)}."
        )
    check_bool("tracking", tracking)
    check_decay("b3", b3)
    check_choice("side", side, SIDES)
    check_bool("clamp_rank", clamp_rank)
    if not basis.kept and (tracking or carry.needs_names):
        raise ValueError(
            "basis is drawn anew at each step, so tracking must be False and carry must be "
            f"curvax.subspaces.keep(); got basis={basis!r}, tracking={tracking!r}, carry={carry!r}."
        )
    rule = SubspaceRule(rank, basis, carry, compensation, b3 if tracking else None, side)

    def init(params: Any) -> SubspaceState:
        check_matrices(params, "in_subspace")
        if not clamp_rank:
            check_ranks(params, rank, basis, rule.orders)
        projected = jax.tree.map(rule.like_projected, params)
        inner_state = inner.init(projected)
        if carry.needs_names:
            find_moments(inner_state, projected)
        return SubspaceState(
            count=jnp.zeros([], jnp.int32),
            subspaces=jax.tree.map(rule.start, params, matrix_keys(params, seed)),
            inner=inner_state,
        )

    def update(updates: Any, state: Any, params: Any = None):
        counts = jax.tree.map(lambda _, x: x.counts, updates, state.subspaces)
        like = updates if params is None else params
        state = restarted(init, flagged(counts), state, like)
        count = next_step(state.count)
        subspaces, inner_state = rule.refreshed(updates, state, refresh, count)
        wide = jax.tree.map(widened if compensation is None else _widened_once, updates)
        bases = jax.tree.map(rule.basis_in_use, wide, subspaces)
        projected, finite, energies = map_unzip(3, rule.project, wide, bases, subspaces)
        moved, inner_state = inner.update(projected, inner_state)
        directions, subspaces = map_unzip(
            2, rule.combined, wide, subspaces, bases, projected, finite, energies, moved
        )
        directions = jax.tree.map(lambda g, d: d.astype(g.dtype), updates, directions)
        return directions, SubspaceState(count, subspaces, inner_state)

    return optax.GradientTransformation(init, update)


def _widened_once(x: jax.Array) -> jax.Array:
    """Converts `x` to float32 at least, once: XLA would convert it again for each use."""
    wide = widened(x)
    return x if wide.dtype == x.dtype else jax.lax.optimization_barrier(wide)
