r"""Element-wise transformations in the eigenbases of the gradients' second moments.

For a gradient $G$ `(m, n)`, on both sides or one of them:

$$L \leftarrow b_3 L + (1-b_3)\, G G^\top, \quad R \leftarrow b_3 R + (1-b_3)\, G^\top G, \qquad
D = U_L\, f(U_L^\top G\, U_R)\, U_R^\top$$

with the eigenvectors $U$ of $L$ and $R$ at their last refresh, by descending eigenvalue, and any
element-wise transformation $f$; with Adam this is SOAP. Before the first refresh a basis is the
identity. At a refresh, the step's gradient enters the statistic first, and the step already uses
the new basis.

The statistics may be those of whitened gradients (`_whitened.py`), which also keeps the eigenvalues
$\lambda$ and $\mu$ of both sides current. Then $f$ may be followed by a division by
$\sqrt{\lambda_i \mu_j}$; with momentum for $f$ this is KL-Shampoo.

*Moments.* $f$ keeps its moments in the rotated space. When a basis changes, first moments rotate
with it, by $U_{new}^\top U_{old}$; this is the same as keeping them in the original space. Second
moments do not rotate like tensors and stay as they are; if a refresh by QR reorders columns, they
are reordered alike, and so are eigenvalues. Fields of moments are recognized by name (`_carry.py`).

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

from .._counts import Counts, counter, next_step
from .._recording import Meaning, record
from .._side import LEFT, RIGHT, Side, sides_of
from .._trees import map_unzip, widened
from .._validate import (
    check_bool,
    check_choice,
    check_decay,
    check_interval,
    check_matrices,
    check_positive_int,
)
from ..directions._carry import Moments, find_moments, put_moments, take_moments
from ..directions._graft import shortened
from ..linalg._eigh import eigenbasis, rayleigh, refined_basis
from ..linalg._tiles import product
from ..refresh._due import refresh_due
from ..refresh._policy import Check, RefreshPolicy, check_refresh, verdict_of
from ..storage._storage import Storage, StorageRecord, as_storage
from ._statistic import SIDES, StatisticRule
from ._whitened import (
    STATISTICS,
    inverse_roots,
    starting_multiple,
    whitened_by_eigenvalues,
)


class BasisCounts(Counts):
    """The counters of a `Basis`."""

    names = ("checks", "refreshes", "rejected", "restarted")


class Basis(NamedTuple):
    """The eigenbases of one side of a batch of matrices; their order `d` is `m` or `n`."""

    statistic: Any  # L or R, (..., d, d) in stored form
    basis: Any  # U in use, (..., d, d) in stored form
    eigenvalues: jax.Array | None  # diag(Uᵀ L U) at its refresh, (..., d), if examined
    spectrum: jax.Array | None  # λ, their running averages, (..., d), of whitened gradients
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
    max_order: int | None = None,
    b3: jax.typing.ArrayLike = 0.95,
    statistics: str = "gradient",
    initial: jax.typing.ArrayLike = 0.0,
    divide: bool = False,
    method: str = "eigh",
    iterations: int = 1,
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
      max_order: sides of a larger order have no basis: the identity in its place.
      b3: decay rate of the statistics, without bias correction; 0 keeps the last gradient only.
      statistics: of the "gradient", or "kl": of the gradient whitened by the other side.
      initial: the statistics start at this multiple of the identity; for 0 with "kl" see
        `_whitened.py`.
      divide: whether to divide what `inner` returns by the roots of the eigenvalues of both sides;
        needs "kl". With `inner=momentum(b1)` this is KL-Shampoo.
      method: "eigh", or "qr": the first basis by `eigh`, each later one by orthogonal iteration
        from the last one.
      iterations: with "qr", the most steps of a refresh. After each step the policy is asked again,
        and the refresh ends when it asks for none, as in the QR algorithm from a warm start
        (Eschenhagen et al., arXiv:2506.03595); `every` ends it after one.
      storage: how statistics and bases are stored; a quantized basis is orthonormal only up to the
        quantization error.
      skip_first: the first step only updates statistics and bases; its direction is 0.
      limit: the largest root mean square of a matrix's direction; longer ones are shortened.
        `_limits.py` has those of `moment_ratio` and of `divide`.

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
    check_choice("statistics", statistics, STATISTICS)
    check_interval("initial", initial, 0.0)
    check_bool("divide", divide)
    whiten = statistics == "kl"
    if divide and not whiten:
        raise ValueError(f"statistics must be 'kl' with divide=True, got {statistics!r}.")
    check_positive_int("iterations", iterations)
    if max_order is not None:
        check_positive_int("max_order", max_order)
    rule = BasisRule(as_storage(storage), b3, refresh, method, iterations, initial, whiten)

    def start(own: Side, x: jax.Array) -> Basis | None:
        if own not in sides_of(side, x, max_order=max_order):
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
            sources, start = (g, g), None
            if whiten:
                sources, start, left, right = rule.whitened(g, left, right, count)
            return (
                None if left is None else rule.accumulated(left, sources[0], LEFT, count, start),
                None if right is None else rule.accumulated(right, sources[1], RIGHT, count, start),
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
        if divide:
            moved = jax.tree.map(divided, moved, left, right)
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


def divided(x: jax.Array, left: Basis | None, right: Basis | None) -> jax.Array:
    """`x (..., m, n)` in the eigenbases, divided by the roots of their eigenvalues."""
    for basis, across in ((left, lambda d: d[..., :, None]), (right, lambda d: d[..., None, :])):
        if basis is not None and basis.spectrum is not None:
            x = x * across(inverse_roots(basis.spectrum))
    return x


@dataclasses.dataclass(frozen=True)
class BasisRule(StatisticRule):
    """The settings shared by all bases."""

    policy: RefreshPolicy
    method: str
    iterations: int
    initial: Any  # the statistic starts as initial · I
    whiten: bool

    def start(self, batch: tuple[int, ...], order: int, dtype: Any) -> Basis:
        """The initial bases of a batch: identities."""
        eye = jnp.broadcast_to(jnp.eye(order, dtype=dtype), (*batch, order, order))
        record(StorageRecord(order, self.storage.describe(order)))
        record(Meaning(f"order {order}: {self.storage.describe(order)}"))
        record(Meaning(f"refresh policy: {type(self.policy).__name__}"))
        keeps = self.policy.examines is not None
        return Basis(
            statistic=self.storage.encode_factor(self.initial * eye, None),
            basis=self.storage.encode_basis(eye, None),
            eigenvalues=jnp.zeros((*batch, order), dtype) if keeps else None,
            spectrum=jnp.full((*batch, order), self.initial, dtype) if self.whiten else None,
            proxy=jnp.zeros(batch, jnp.float32) if keeps else None,
            counts=BasisCounts.zeros(batch),
        )

    def whitened(
        self, g: jax.Array, left: Basis | None, right: Basis | None, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Basis | None, Basis | None]:
        """What the statistics average of `g`, where they start, and bases with new eigenvalues."""
        dtype = jnp.promote_types(g.dtype, jnp.float32)
        bases = (left, right)
        sides = sum(basis is not None for basis in bases)
        start = starting_multiple(g, max(1, sides), self.initial, dtype)

        def rotate(x: jax.Array, side: Side) -> jax.Array:
            stored = [
                None if basis is None or own is not side else basis.basis
                for basis, own in zip(bases, Side, strict=True)
            ]
            with jax.default_matmul_precision("highest"):
                product = functools.partial(self.storage.rotate, back=False)
                return self.two_sided(product, x, stored, count)

        def current(basis: Basis | None) -> jax.Array | None:
            if basis is None or basis.spectrum is None:
                return None
            empty = ~jnp.any(basis.spectrum != 0, axis=-1, keepdims=True)
            return jnp.where(empty, start[..., None], basis.spectrum)

        old = (current(left), current(right))
        sources, new = whitened_by_eigenvalues(g.astype(dtype), rotate, old, self.b2)
        left, right = (
            None if basis is None else basis._replace(spectrum=d.astype(dtype))
            for basis, d in zip(bases, new, strict=True)
        )
        return sources, start, left, right

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
                    lambda: self._refined(statistic, old),
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
                moved = [_exact(turn, m).astype(m.dtype) for m in first]
                return Moments(moved, [v[order] for v in second])
            moved = [_exact(m, turn.mT).astype(m.dtype) for m in first]
            return Moments(moved, [v[:, order] for v in second])

        moments = jax.lax.cond(changed, turned, lambda same: same, moments)
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, rayleigh(statistic, used), eigenvalues)
        spectrum = basis.spectrum
        if spectrum is not None:
            reordered = spectrum[order]
            # The averages so far are those of the identity as a basis.
            carried = jax.lax.cond(never, lambda: rayleigh(statistic, used), lambda: reordered)
            spectrum = jnp.where(changed, carried, spectrum)
        first = jnp.zeros_like(statistic) + self.initial * jnp.eye(len(old), dtype=statistic.dtype)
        basis = basis._replace(
            statistic=self.kept_statistic(sound, basis.statistic, first),
            spectrum=spectrum,
            basis=jax.tree.map(lambda a, b: jnp.where(changed, a, b), stored, basis.basis),
            eigenvalues=eigenvalues,
            proxy=proxy,
            counts=basis.counts.plus(checks=1, refreshes=changed, rejected=~good, restarted=~sound),
        )
        return basis, moments

    def _refined(self, statistic: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Steps of orthogonal iteration until the policy asks for no more, and the new order."""

        def again(basis: jax.Array) -> jax.Array:
            check = Check(statistic, basis, rayleigh(statistic, basis), jnp.bool_(False))
            return verdict_of(self.policy, check).refresh

        most = 1 if self.policy.examines is None else self.iterations
        return refined_basis(statistic, old, most, again)

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
