r"""Element-wise transformations in the eigenbases of the gradients' second moments.

For a gradient $G$ `(m, n)`, on both sides or one of them:

$$L \leftarrow b_3 L + (1-b_3)\, G G^\top, \quad R \leftarrow b_3 R + (1-b_3)\, G^\top G, \qquad
D = U_L\, f(U_L^\top G\, U_R)\, U_R^\top$$

with the eigenvectors $U$ of $L$ and $R$ at their last refresh, by descending eigenvalue, and any
element-wise transformation $f$; with Adam this is SOAP. Before the first refresh a basis is the
identity. At a refresh, the step's gradient enters the statistic first, and the step already uses
the new basis.

*Moments.* $f$ keeps its moments in the rotated space. When a basis changes, first moments rotate
with it, by $U_{new}^\top U_{old}$; this is the same as keeping them in the original space. Second
moments do not rotate like tensors and stay as they are; if a refresh by QR reorders columns, they
are reordered alike. Fields of moments are recognized by name (`_carry.py`).

*Bound.* With both kinds of moments in one basis, $f$ keeps the bound of `_moment_ratio.py`. A
refresh breaks it, because an entry may get a moment from one place and a variance from another.
`limit` keeps it per matrix, also where 4 bits leave a basis that is not orthonormal.

*Numerics.* Statistics and bases in float32 at least. If a statistic or new basis is not finite, the
last basis stays in use, and `rejected` counts it; such a statistic starts anew (`restarted`).
*Cost*: `2mn(m + n)` FLOPs for the statistics and `4mn(m + n)` for the rotations at each step;
`O(m³ + n³)` at a refresh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._counts import Counts, counter, next_step
from .._recording import Meaning, record
from .._side import LEFT, RIGHT, Side, sides_of
from .._trees import map_unzip, widened
from .._validate import check_bool, check_choice, check_decay, check_interval, check_matrices
from ..directions._carry import Moments, find_moments, put_moments, take_moments
from ..directions._graft import shortened
from ..directions._moment_ratio import largest_ratio
from ..linalg._eigh import eigenbasis, refined_basis
from ..linalg._tiles import product
from ..refresh._due import refresh_due
from ..refresh._policy import Check, RefreshPolicy, check_refresh, verdict_of
from ..storage._storage import Storage, StorageRecord, as_storage
from ._statistic import SIDES, StatisticRule


class BasisCounts(Counts):
    """The counters of a `Basis`."""

    names = ("checks", "refreshes", "rejected", "restarted")


class Basis(NamedTuple):
    """The eigenbases of one side of a batch of matrices; their order `d` is `m` or `n`."""

    statistic: Any  # L or R, (..., d, d) in stored form
    basis: Any  # U in use, (..., d, d) in stored form
    eigenvalues: jax.Array | None  # diag(Uᵀ L U) at its refresh, (..., d), if examined
    proxy: jax.Array | None  # the policy's last figure, float32 (...)
    counts: BasisCounts

    checks = counter("checks")  # times the basis was due, int32 (...)
    refreshes = counter("refreshes")  # bases replaced
    rejected = counter("rejected")  # checks with a non-finite statistic or basis: no change
    restarted = counter("restarted")  # checks whose statistic was not finite and started anew


class EigenbasisState(NamedTuple):
    """State of `in_eigenbasis`."""

    count: jax.Array  # t, int32 scalar
    left: Any  # a Basis or None per leaf
    right: Any  # the same for the right side
    inner: Any  # state of the inner transformation, for the rotated matrices


def in_eigenbasis(
    inner: optax.GradientTransformation,
    *,
    refresh: RefreshPolicy,
    side: str = "both",
    b3: jax.typing.ArrayLike = 0.95,
    method: str = "eigh",
    storage: Storage | None = None,
    skip_first: bool = False,
    limit: jax.typing.ArrayLike = float("inf"),
) -> optax.GradientTransformation:
    """Runs an element-wise transformation in the gradients' eigenbases.

    Args:
      inner: an element-wise transformation; `moment_ratio()` makes SOAP. It gets no parameters. A
        transformation that takes norms over its tree would mix matrices.
      refresh: policy for the bases, such as `every(10)` or `policies.diagonal_residual`.
      side: "both", "left", "right", or "smaller": only the side of smaller order (left for square
        matrices).
      b3: decay rate of the statistics, without bias correction; 0 keeps the last gradient only.
      method: "eigh", or "qr": the first basis by `eigh`, each later one by one step of orthogonal
        iteration.
      storage: how statistics and bases are stored; a quantized basis is orthonormal only up to the
        quantization error.
      skip_first: the first step only updates statistics and bases; its direction is 0.
      limit: the largest root mean square of a matrix's direction; longer ones are shortened.
        `limit_of_moments` is that of `moment_ratio`.

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: if an argument is outside its range or a leaf is not a matrix; the message
        names it.

    Example:
      >>> import curvax, optax
      >>> soap_with_lion = curvax.in_eigenbasis(optax.scale_by_lion(), refresh=curvax.every(10))
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an Optax transformation, got {inner!r}.")
    check_refresh(refresh, ("eigenpairs",))
    check_choice("side", side, SIDES)
    check_decay("b3", b3)
    check_choice("method", method, ("eigh", "qr"))
    check_bool("skip_first", skip_first)
    check_interval("limit", limit, 0.0, open_low=True, open_high=False)
    rule = BasisRule(as_storage(storage), b3, refresh, method)

    def start(own: Side, x: jax.Array) -> Basis | None:
        if own not in sides_of(side, x):
            return None
        return rule.start(x.shape[:-2], own.order(x), jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Any) -> EigenbasisState:
        check_matrices(params, "in_eigenbasis")
        inner_state = inner.init(widened(params))
        find_moments(inner_state, params)
        return EigenbasisState(
            count=jnp.zeros([], jnp.int32),
            left=jax.tree.map(functools.partial(start, LEFT), params),
            right=jax.tree.map(functools.partial(start, RIGHT), params),
            inner=inner_state,
        )

    def update(updates: Any, state: Any, params: Any = None):
        del params
        count = next_step(state.count)

        def accumulate(g: jax.Array, left: Basis | None, right: Basis | None):
            return (
                None if left is None else rule.accumulated(left, g, LEFT, count),
                None if right is None else rule.accumulated(right, g, RIGHT, count),
            )

        left, right = map_unzip(2, accumulate, updates, state.left, state.right)
        moments = take_moments(state.inner, updates)
        left, moments = rule.refreshed(LEFT, updates, left, moments, count)
        right, moments = rule.refreshed(RIGHT, updates, right, moments, count)
        carried = put_moments(state.inner, updates, moments)

        def rotate(x: jax.Array, left: Basis | None, right: Basis | None, back: bool = False):
            bases = [None if basis is None else basis.basis for basis in (left, right)]
            product = functools.partial(rule.storage.rotate, back=back)
            return rule.two_sided(product, x, bases, count)

        rotated = jax.tree.map(rotate, widened(updates), left, right)
        moved, inner_state = inner.update(rotated, carried)
        wide = jax.tree.map(functools.partial(rotate, back=True), moved, left, right)
        directions = jax.tree.map(
            lambda d, g: shortened(d, limit * math.prod(d.shape[-2:]) ** 0.5).astype(g.dtype),
            wide,
            updates,
        )
        if skip_first:
            first = count == 1
            directions = jax.tree.map(lambda d: jnp.where(first, 0, d), directions)
            inner_state = jax.tree.map(
                lambda old, new: jnp.where(first, old, new), carried, inner_state
            )
        return directions, EigenbasisState(count, left, right, inner_state)

    return optax.GradientTransformation(init, update)


def limit_of_moments(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, refresh: RefreshPolicy
) -> Any:
    """The largest root mean square of `moment_ratio(b1, b2)` in a basis that never turns.

    It is infinite with `every(1)`: there a turned moment is divided by a variance of the other
    basis at every step, and the papers' trajectories exceed the bound.
    """
    most = largest_ratio(b1, b2)
    period = refresh.schedule.period
    if isinstance(period, Tracer):
        return jnp.where(period > 1, most, jnp.inf)
    return most if period > 1 else float("inf")


@dataclasses.dataclass(frozen=True)
class BasisRule(StatisticRule):
    """The settings shared by all bases."""

    policy: RefreshPolicy
    method: str

    def start(self, batch: tuple[int, ...], order: int, dtype: Any) -> Basis:
        """The initial bases of a batch: identities."""
        eye = jnp.broadcast_to(jnp.eye(order, dtype=dtype), (*batch, order, order))
        record(StorageRecord(order, self.storage.describe(order)))
        record(Meaning(f"order {order}: {self.storage.describe(order)}"))
        record(Meaning(f"refresh policy: {type(self.policy).__name__}"))
        keeps = self.policy.examines is not None
        return Basis(
            statistic=self.storage.encode_factor(0 * eye, None),
            basis=self.storage.encode_basis(eye, None),
            eigenvalues=jnp.zeros((*batch, order), dtype) if keeps else None,
            proxy=jnp.zeros(batch, jnp.float32) if keeps else None,
            counts=BasisCounts.zeros(batch),
        )

    def refresh_one(self, entry: tuple[Basis, Moments], side: Side) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        basis, moments = entry
        statistic = self.storage.decode_factor(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound = jnp.isfinite(statistic).all()
        never = basis.refreshes == 0
        refresh, proxy, eigenvalues = jnp.bool_(True), basis.proxy, basis.eigenvalues
        if eigenvalues is not None:
            first = never | ~jnp.isfinite(eigenvalues).all()
            check = Check(statistic, old, eigenvalues, first)
            refresh, proxy, *_ = verdict_of(self.policy, check, proxy)

        in_order = jnp.arange(len(old))

        def renewed() -> tuple[Any, jax.Array, jax.Array]:
            if self.method == "eigh":
                new, order = eigenbasis(statistic), in_order
            else:
                new, order = jax.lax.cond(
                    never,
                    lambda: (eigenbasis(statistic), in_order),
                    lambda: refined_basis(statistic, old),
                )
            coded = self.storage.encode_basis(new, basis.basis)
            return coded, order, jnp.isfinite(new).all()

        def kept() -> tuple[Any, jax.Array, jax.Array]:
            return basis.basis, in_order, jnp.bool_(True)

        stored, order, finite = jax.lax.cond(refresh, renewed, kept)
        good = finite & sound
        changed = refresh & good
        used = self.storage.decode_basis(stored)

        def turned(moments: Moments) -> Moments:
            turn = product(used.mT, old).astype(old.dtype)
            first, second = moments
            if side is LEFT:
                return Moments([_exact(turn, m) for m in first], [v[order] for v in second])
            return Moments([_exact(m, turn.mT) for m in first], [v[:, order] for v in second])

        moments = jax.lax.cond(changed, turned, lambda same: same, moments)
        if eigenvalues is not None:
            moved = product(statistic, used)
            eigenvalues = jnp.where(changed, jnp.sum(used * moved, axis=0), eigenvalues)
        basis = basis._replace(
            statistic=self.kept_statistic(sound, basis.statistic, jnp.zeros_like(statistic)),
            basis=jax.tree.map(lambda a, b: jnp.where(changed, a, b), stored, basis.basis),
            eigenvalues=eigenvalues,
            proxy=proxy,
            counts=basis.counts.plus(checks=1, refreshes=changed, rejected=~good, restarted=~sound),
        )
        return basis, moments

    def refreshed(
        self, side: Side, like: Any, bases: Any, moments: Any, count: jax.Array
    ) -> tuple[Any, Any]:
        """One side's bases after the refreshes due at this step, and the moments carried along."""

        def packed(_: jax.Array, basis: Basis | None, moments: Moments) -> Any:
            return None if basis is None else (basis, moments)

        def unpacked(_: jax.Array, entry: Any, moments: Moments) -> Any:
            return (None, moments) if entry is None else entry

        entries = jax.tree.map(packed, like, bases, moments)
        costs = jax.tree.map(lambda x: float(side.order(x)) ** 3, like)
        refresh_one = functools.partial(self.refresh_one, side=side)
        entries = refresh_due(refresh_one, like, entries, costs, self.policy.schedule, count)
        return map_unzip(2, unpacked, like, entries, moments)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.result_type(a, b)
    return product(a.astype(dtype), b.astype(dtype))
