r"""Kronecker-factored preconditioning: statistics, inverse roots, and their application.

For a gradient $G$ `(m, n)` and the matrix $M$ that is preconditioned ($G$ itself or its momentum):

$$L \leftarrow b_2 L + (1-b_2)\, S S^\top, \quad R \leftarrow b_2 R + (1-b_2)\, S^\top S, \quad
D = (L + \epsilon I)^{-1/p}\, M\, (R + \epsilon I)^{-1/p}$$

where $S$ is $G$ (or $M$), either factor may be absent, and the refresh policy says when roots are
computed and with how much damping; between refreshes the last roots stay in use. Before the first
refresh a root is the identity.

*Numerics.* Statistics and roots in float32 (float64 for float64 parameters), with
`Precision.HIGHEST` where a product feeds a root. A root that comes back non-finite is not used:
the last good one stays, and the factor counts it. Neither is one of a statistic that is zero still,
after a first gradient that was zero or not usable: it would be `ε^(-1/p) I`, far too long for what
follows. Such a factor is tried again at every step. *Cost* of a factor of order `d` beside `k`:
`2d²k` FLOPs for the statistic, `2d²k` for the product, `O(d³)` at a refresh; `8d²` bytes, `12d²`
with a policy that keeps eigenpairs. Factors that are due are worked on one after the other.

Under `vmap` the step is a tracer per replica, and loops and branches become selects: refreshes are
then computed at every step. `optax.MultiSteps` updates once in `k` mini-steps; steps count updates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._guard import TakesUsable, update_guarded
from .._trees import map_unzip
from .._validate import (
    check_choice,
    check_decay,
    check_interval,
    check_matrices,
    check_positive_int,
)
from ..linalg._inverse_root import check_root_arguments
from ..refresh._due import at_most_once, visit_due
from ..refresh._policy import Every, RefreshPolicy, check_refresh
from ..storage._storage import Storage, as_storage
from ._factor import Factor, FactorRule
from ._statistic import SIDES, has_side


class PreconditionState(NamedTuple):
    """State of `precondition`."""

    count: jax.Array  # t, int32 scalar
    left: Any  # a Factor, or None, for every leaf
    right: Any  # the same for the right side
    momentum: Any  # state of the transformation that gives M


def precondition(
    momentum: optax.GradientTransformation | None = None,
    *,
    refresh: RefreshPolicy,
    sides: str = "both",
    square: str = "left",
    root: int = 4,
    b2: jax.typing.ArrayLike | None = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    damping: str = "absolute",
    solver: str = "eigh",
    initial: jax.typing.ArrayLike = 0.0,
    statistics: str = "gradient",
    statistics_every: int = 1,
    warmup_steps: int = 0,
    storage: Storage | None = None,
) -> optax.GradientTransformation:
    """Preconditions matrices by inverse roots of their Kronecker factors.

    Args:
      momentum: transformation of the gradient that gives the preconditioned `M`; `None` is `M = G`.
      refresh: policy for the roots: `every(10)`, FOAM's, DR's, or one of your own.
      sides: "both", "left", "right", or "smaller": the factor of the smaller order alone.
      square: side that "smaller" takes for square matrices, "left" or "right".
      root: p, of the inverse p-th root.
      b2: decay rate of the statistics, which are not bias-corrected; `None` sums.
      eps: damping. 0 takes the root on the factor's range only ("eigh").
      damping: "absolute"; "relative", a multiple of the largest eigenvalue; "floor", eigenvalues
        are at least `eps`; or "outside", added to `L^(1/p)` instead of `L`.
      solver: "eigh", "coupled_newton" (p a power of 2) or "newton_schulz" (p = 2).
      initial: the statistics start as this multiple of the identity.
      statistics: "gradient" or "momentum": what the statistics are formed from.
      statistics_every: T1; statistics are updated at steps `t mod T1 = 0`.
      warmup_steps: steps that only gather statistics; the direction is 0 until they are over.
      storage: how factors and roots are kept; `dense()` by default.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: naming an argument outside its range, or a leaf that is no matrix.
    """
    check_choice("sides", sides, SIDES)
    check_choice("square", square, ("left", "right"))
    check_choice("statistics", statistics, ("gradient", "momentum"))
    check_root_arguments(root, solver, damping)
    check_interval("eps", eps, 0.0)
    check_interval("initial", initial, 0.0)
    check_positive_int("statistics_every", statistics_every)
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"warmup_steps must be an integer of at least 0, got {warmup_steps!r}.")
    if b2 is not None:
        check_decay("b2", b2)
    check_policy(refresh, eps, damping, solver)
    rule = FactorRule(as_storage(storage), b2, refresh, root, eps, damping, solver, initial)
    average = optax.identity() if momentum is None else momentum
    if not isinstance(average, optax.GradientTransformation):
        raise ValueError(f"momentum must be an Optax transformation or None, got {momentum!r}.")

    def start(side: str, x: jax.Array) -> Factor | None:
        if not has_side(sides, side, x.shape, square):
            return None
        order = x.shape[-2] if side == "left" else x.shape[-1]
        return rule.start(x.shape[:-2], order, jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Any) -> PreconditionState:
        check_matrices(params, "precondition")
        return PreconditionState(
            count=jnp.zeros([], jnp.int32),
            left=jax.tree.map(lambda x: start("left", x), params),
            right=jax.tree.map(lambda x: start("right", x), params),
            momentum=average.init(params),
        )

    def update(updates: Any, state: Any, params: Any = None, usable: Any = None, **_: Any):
        count: Any = optax.safe_increment(state.count)
        matrices, momentum_state = updates, state.momentum
        if momentum is not None:
            matrices, momentum_state = update_guarded(
                momentum, updates, state.momentum, params, usable
            )
        source = updates if statistics == "gradient" else matrices
        whole = usable if source is updates else None  # a momentum has taken in zeros already
        left, right = _gathered(rule, source, whole, state, statistics_every, count)
        left, right = _refreshed(rule, updates, left, right, count)

        def applied(m: jax.Array, left: Factor | None, right: Factor | None):
            roots = [None if factor is None else factor.root for factor in (left, right)]
            return (rule.between(m, roots, (False, False), count),)

        (directions,) = map_unzip(1, applied, matrices, left, right)
        if warmup_steps:
            directions = jax.tree.map(lambda d: jnp.where(count > warmup_steps, d, 0), directions)
        return directions, PreconditionState(count, left, right, momentum_state)

    def usable_of(updates: Any) -> Any:
        return jax.tree.map(
            lambda x: rule.is_usable(x, has_side(sides, "left", x.shape, square)), updates
        )

    transformation = TakesUsable(init, update)
    if statistics == "gradient" and statistics_every == 1:
        transformation.usable_of = usable_of
    return transformation


def check_policy(refresh: Any, eps: jax.typing.ArrayLike, damping: str, solver: str) -> None:
    """Requires a refresh policy that fits the other arguments.

    Raises:
      ValueError: naming the argument and what is allowed.
    """
    check_refresh(refresh)
    if refresh.keeps_eigenpairs:
        check_choice("solver (with this refresh policy)", solver, ("eigh",))
        check_choice("damping (with this refresh policy)", damping, ("absolute",))
        check_interval("eps (with this refresh policy)", eps, 0.0, open_low=True)
    most = getattr(refresh, "max_damping", None)
    if most is not None and not isinstance(most, Tracer):
        check_interval("eps (below the refresh policy's max_damping)", eps, 0.0, most)


def _gathered(
    rule: FactorRule,
    source: Any,
    usable: Any,
    state: PreconditionState,
    period: int,
    count: jax.Array,
) -> Any:
    """Both sides' factors with this step's statistics, if they are due."""

    def taken_in(s: jax.Array, usable: Any, left: Factor | None, right: Factor | None):
        new_left = None if left is None else rule.accumulated(left, s, True, count, usable)
        return new_left, None if right is None else rule.accumulated(right, s, False, count, usable)

    def gather(given: Any, factors: Any) -> Any:
        source, usable = given
        usable = jax.tree.map(lambda _: None, source) if usable is None else usable
        return map_unzip(2, taken_in, source, usable, *factors)

    factors = (state.left, state.right)
    if period == 1:
        return gather((source, usable), factors)
    return at_most_once(gather, count % period == 0, (source, usable), factors)


def _refreshed(
    rule: FactorRule, like: Any, left: Any, right: Any, count: jax.Array
) -> tuple[Any, Any]:
    """Both sides' factors after the visits that are due at this step."""
    leaves, treedef = jax.tree.flatten(like)
    sides = [treedef.flatten_up_to(side) for side in (left, right)]
    places = [(s, i) for s in (0, 1) for i in range(len(leaves)) if sides[s][i] is not None]
    order = [leaves[i].shape[-2] if s == 0 else leaves[i].shape[-1] for s, i in places]
    schedule: Every = rule.policy.schedule

    def select(i: int, due: jax.Array) -> jax.Array:
        s, k = places[i]
        return due | rule.untried(sides[s][k]).reshape(-1)

    visited = visit_due(
        rule.visited,
        [sides[s][i] for s, i in places],
        [leaves[i].shape[:-2] for _, i in places],
        [float(d) ** 3 for d in order],
        schedule,
        count,
        select,
    )
    for (s, i), factor in zip(places, visited, strict=True):
        sides[s][i] = factor
    return treedef.unflatten(sides[0]), treedef.unflatten(sides[1])
