"""The eigenbases of one side of a batch of matrices: when they are renewed, and what turns along.

`_eigenbasis.py` says what they are for. At a refresh, the moments of the transformation in the
basis are carried along, and eigenvalues that are averaged at every step are put in the new order.

*Numerics.* A statistic or a new basis that is not finite changes nothing but itself. Averaged
eigenvalues that are not finite (of a damaged state) start anew at the next step, because those of
one side make the other's; `restarted` counts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._counts import Counts, counter
from .._recording import Meaning, record
from .._side import LEFT, Side
from .._trees import map_unzip
from ..directions._carry import Moments
from ..linalg._eigh import eigenbasis, rayleigh, refined_basis
from ..linalg._numerics import magnitude
from ..linalg._platforms import in_turn
from ..linalg._tiles import product
from ..refresh._due import refresh_due
from ..refresh._policy import Check, RefreshPolicy, verdict_of
from ..storage._storage import StorageRecord
from ._statistic import StatisticRule, each_of, identity
from ._whitened import (
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
    restarted = counter("restarted")  # statistics or eigenvalues not finite, which started anew


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
        eye = identity(order, dtype)
        record(StorageRecord(order, self.storage.describe(order)))
        record(Meaning(f"order {order}: {self.storage.describe(order)}"))
        record(Meaning(f"refresh policy: {type(self.policy).__name__}"))
        keeps = self.policy.examines is not None
        return Basis(
            statistic=each_of(batch, self.storage.encode_factor(self.initial * eye, None)),
            basis=each_of(batch, self.storage.encode_basis(eye, None)),
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

        def turned(entry: Any) -> Any:
            (x, *_), bases = entry
            left, right = self.opened(x, bases)
            with jax.default_matmul_precision("highest"):
                rows, columns = (self.rotated(x, own) for own in ((left, None), (None, right)))
                both = self.rotated(rows, (None, right))
            return (rows, columns, both), bases

        def damaged(spectrum: Any) -> jax.Array:
            return ~jnp.isfinite(spectrum).all(axis=-1)

        def current(basis: Basis | None) -> jax.Array | None:
            if basis is None or basis.spectrum is None:
                return None
            empty = ~jnp.any(basis.spectrum != 0, axis=-1) | damaged(basis.spectrum)
            return jnp.where(empty[..., None], start[..., None], basis.spectrum)

        def renewed(basis: Basis | None, d: jax.Array) -> Basis | None:
            if basis is None:
                return None
            counts = basis.counts.plus(restarted=damaged(basis.spectrum))
            return basis._replace(spectrum=d.astype(dtype), counts=counts)

        old = (current(left), current(right))
        work = g.astype(dtype)
        stored = [None if basis is None else basis.basis for basis in bases]
        (rows, columns, both), _ = self.visited(turned, ((work,) * 3, stored), g, stored, count)
        sources, new = whitened_by_eigenvalues(rows, columns, both, old, self.b2)
        left, right = map(renewed, bases, new)
        return sources, start, left, right

    def opened(self, x: jax.Array, bases: Sequence[Any]) -> list[Any]:
        """Stored bases of the sides of `x (..., m, n)`, read for `rotated`."""
        return [
            None if own is None else self.storage.open_basis(own, side.other.order(x))
            for side, own in zip(Side, bases, strict=True)
        ]

    def rotated(self, x: jax.Array, opened: Sequence[Any], back: bool = False) -> jax.Array:
        """`U_Lᵀ x U_R` or, `back`, `U_L x U_Rᵀ`, in the dtype of `x`."""

        def turned(x: jax.Array, opened: Sequence[Any]) -> jax.Array:
            work = x
            for side, own in zip(Side, opened, strict=True):
                work = work if own is None else self.storage.rotate(own, work, side, back)
            return work.astype(x.dtype)

        return in_turn(turned, x, opened)

    def refresh_one(self, entry: tuple[Basis, Moments], side: Side) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        basis, moments = entry
        statistic = self.storage.decode_factor(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound = jnp.isfinite(magnitude(statistic))
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
            return coded, order, jnp.isfinite(magnitude(new))

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
        first = jnp.zeros_like(statistic) + self.initial * identity(len(old), statistic.dtype)
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
        alone = self.policy.examines is not None or self.method != "eigh"

        def numbers_of(x: jax.Array) -> int | None:
            return None if alone or self.one_by_one(side.order(x)) else max(x.shape[-2:]) ** 2

        numbers = jax.tree.map(numbers_of, like)
        schedule = self.policy.schedule
        entries = refresh_due(refresh_one, like, entries, costs, schedule, count, numbers=numbers)
        return map_unzip(2, unpacked, like, entries, moments)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.result_type(a, b)
    return product(a.astype(dtype), b.astype(dtype))
