"""The eigenbases of one side of a batch of matrices, and the moments that turn with them.

`_eigenbasis.py` says how they are used. A refresh carries the moments of the transformation in the
basis along, and puts eigenvalues that are averaged at every step in the new order.

*Numerics.* A statistic or a new basis that is not finite changes nothing but itself. Averaged
eigenvalues that are not finite (of a damaged state) start anew at the next step, because those of
one side make the other's; `restarted` counts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._counts import counter, counters
from .._side import LEFT, Side
from .._trees import widened
from ..directions._carry import Moments
from ..linalg._eigh import eigenbasis, rayleigh, refined_basis
from ..linalg._loops import in_turn
from ..linalg._numerics import magnitude
from ..linalg._products import at, exact_product
from ..refresh._due import Refreshing, refresh_due
from ..refresh._policy import Check, verdict_of
from ._methods import METHODS, BasisMethod, Qr
from ._statistic import StatisticRule, each_of, identity
from ._whitened import starting_multiple, whitened_by_eigenvalues


@counters
class BasisCounts(NamedTuple):
    """The counters of a `Basis`."""

    value: Any
    names = ("checks", "refreshes", "rejected", "restarted")


class Basis(NamedTuple):
    """The eigenbases of one side of a batch of matrices; their order `d` is `m` or `n`."""

    statistic: Any  # L or R, (..., d, d) in stored form
    basis: Any  # U in use, (..., d, d) in stored form
    eigenvalues: jax.Array | None  # diag(Uᵀ L U) at its refresh, (..., d), if examined
    spectrum: jax.Array | None  # λ, their running averages, (..., d), of whitened gradients
    proxy: jax.Array | None  # the policy's last figure, float32 (...)
    counts: BasisCounts
    phase: jax.Array | None = None  # when it is due, int32 (...), if staggered

    checks = counter("checks")  # times the basis was due, int32 (...)
    refreshes = counter("refreshes")  # bases replaced
    rejected = counter("rejected")  # checks with a non-finite statistic or basis: no change
    restarted = counter("restarted")  # statistics or eigenvalues not finite, which started anew


Bases = tuple[Basis | None, Basis | None]
"""The bases of the left and of the right side."""


@dataclasses.dataclass(frozen=True)
class BasisRule(StatisticRule):
    """The settings shared by all bases."""

    method: BasisMethod
    initial: Any  # the statistic starts as initial · I
    whiten: bool
    follows = False  # whether statistics, and gradients at a refresh, are in the bases

    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None = None
    ) -> Basis:
        """The initial bases of a batch: identities."""
        eye, examined = identity(order, dtype), self.policy.examines is not None
        return Basis(
            statistic=each_of(batch, self.encoded(self.initial * eye, None)),
            basis=each_of(batch, self.storage.encode_basis(eye, None)),
            eigenvalues=jnp.zeros((*batch, order), dtype) if examined else None,
            spectrum=jnp.full((*batch, order), self.initial, dtype) if self.whiten else None,
            proxy=jnp.zeros(batch, jnp.float32) if examined else None,
            counts=BasisCounts.zeros(batch),
            phase=phase,
        )

    def in_bases(self, g: jax.Array, bases: Bases, count: jax.Array) -> jax.Array:
        """The gradient in the bases in use."""

        def entered(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            return self.rotated(x, self.opened(x, stored))

        wide = widened(g)
        stored = [None if basis is None else basis.basis for basis in bases]
        return self.visited(entered, wide, wide, stored, count)

    def both_accumulated(
        self, g: jax.Array, seen: jax.Array, bases: Bases, count: jax.Array
    ) -> Bases:
        """The bases of both sides, with `seen` in their statistics: the gradient, or that in them.

        With whitened gradients also with new eigenvalues.
        """
        sources, start = (seen, seen), None
        if self.whiten:
            sources, start, bases = self.whitened(g, seen, bases, count)
        left, right = [
            None if basis is None else self.accumulated(basis, source, own, count, start)
            for basis, source, own in zip(bases, sources, Side, strict=True)
        ]
        return left, right

    def turned_sides(
        self, seen: jax.Array, bases: Sequence[Any], count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`U_Lᵀ G`, `G U_R` and `U_Lᵀ G U_R`, for `seen`."""

        def turned(given: Any, bases: Sequence[Any]) -> Any:
            x, *_ = given
            left, right = self.opened(x, bases)
            with jax.default_matmul_precision("highest"):
                rows, columns = (self.rotated(x, own) for own in ((left, None), (None, right)))
                both = self.rotated(rows, (None, right))
            return rows, columns, both

        return self.visited(turned, (seen,) * 3, seen, bases, count)

    def whitened(
        self, g: jax.Array, seen: jax.Array, bases: Bases, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Bases]:
        """The matrices that the statistics average, their start, and bases with new eigenvalues."""
        dtype = np.promote_types(g.dtype, np.float32)
        sides = sum(basis is not None for basis in bases)
        start = starting_multiple(g, max(1, sides), self.initial, dtype)

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

        left, right = bases
        old = (current(left), current(right))
        stored = [None if basis is None else basis.basis for basis in bases]
        rows, columns, both = self.turned_sides(seen.astype(dtype), stored, count)
        sources, new = whitened_by_eigenvalues(rows, columns, both, old, self.b2)
        return sources, start, (renewed(left, new[0]), renewed(right, new[1]))

    def opened(self, x: jax.Array, bases: Sequence[Any]) -> list[Any]:
        """Stored bases of the sides of `x (..., m, n)`, read for `rotated`."""
        with at(self.products.step):
            return [
                None if own is None else self.storage.open_basis(own, x.shape[side.other_axis])
                for side, own in zip(Side, bases, strict=True)
            ]

    def rotated(self, x: jax.Array, opened: Sequence[Any], back: bool = False) -> jax.Array:
        """`U_Lᵀ x U_R` or, `back`, `U_L x U_Rᵀ`, in the dtype of `x`."""

        def turned(x: jax.Array, opened: Sequence[Any]) -> jax.Array:
            work = x
            with at(self.products.step):
                for side, own in zip(Side, opened, strict=True):
                    work = work if own is None else self.storage.rotate(own, work, side, back)
            return work.astype(x.dtype)

        return in_turn(turned, x, opened)

    def refresh_one(
        self, entry: tuple[Basis, Moments], given: None, side: Side
    ) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        del given
        basis, moments = entry
        statistic = self.decoded(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound, in_order = jnp.isfinite(magnitude(statistic)), jnp.arange(len(old))
        never_refreshed = basis.refreshes == 0
        refresh, proxy, eigenvalues = jnp.bool_(True), basis.proxy, basis.eigenvalues
        if eigenvalues is not None:
            anew = never_refreshed | ~jnp.isfinite(eigenvalues).all()
            check = Check(statistic, old, eigenvalues, anew)
            refresh, proxy, *_ = verdict_of(self.policy, check, proxy)

        def renewed() -> tuple[Any, jax.Array, jax.Array]:
            """The basis, stored; its columns' new order; and whether it is finite."""
            if isinstance(self.method, Qr):
                new, order = self._refined(statistic, old)
            else:
                new, order = eigenbasis(statistic), in_order
            coded = self.storage.encode_basis(new, basis.basis)
            return coded, order, jnp.isfinite(magnitude(new))

        stored, order, finite = jax.lax.cond(
            refresh, renewed, lambda: (basis.basis, in_order, jnp.bool_(True))
        )
        good = finite & sound
        changed = refresh & good
        used = self.storage.decode_basis(stored)
        moments = jax.lax.cond(
            changed,
            lambda: turned(moments, exact_product(old, used, transpose_a=True), side, order),
            lambda: moments,
        )
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, rayleigh(statistic, used), eigenvalues)
        spectrum = basis.spectrum
        if spectrum is not None:
            reordered = spectrum[order]
            # The averages so far are those of the identity as a basis.
            at_first = jnp.bool_(False) if isinstance(self.method, Qr) else never_refreshed
            carried = jax.lax.cond(at_first, lambda: rayleigh(statistic, used), lambda: reordered)
            spectrum = jnp.where(changed, carried, spectrum)
        initial = jnp.zeros_like(statistic) + self.initial * identity(len(old), statistic.dtype)
        basis = basis._replace(
            statistic=self.kept_statistic(sound, basis.statistic, initial),
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

        assert isinstance(self.method, Qr)
        return refined_basis(statistic, old, self.method.steps, again)

    def refreshing(self, side: Side, x: Any) -> Refreshing:
        """What it takes to refresh one basis of `x (..., m, n)`."""
        order = side.order(x)
        alone = self.policy.examines is not None or self.storage.decodes_singly(order)
        return Refreshing(float(order) ** 3, None if alone else max(x.shape[-2:]) ** 2)

    def visits(self, never: jax.Array) -> list[tuple[Callable[..., Any], jax.Array | None]]:
        """What refreshes single matrices, and which of those due, bool (size,); `None`: all.

        Args:
          never: which have never been refreshed.
        """
        if not isinstance(self.method, Qr):
            return [(self.refresh_one, None)]
        first = dataclasses.replace(self, method=METHODS["eigh"])
        return [(first.refresh_one, never), (self.refresh_one, ~never)]

    def refreshed(
        self, g: jax.Array, seen: jax.Array, bases: Bases, moments: Moments, count: jax.Array
    ) -> tuple[Bases, Moments, jax.Array]:
        """Both sides after the refreshes due at this step, the moments with them, and the gradient.

        Where it `follows`, the gradient comes in the bases, as `seen` is.
        """
        del seen
        found: list[Any] = [*bases]
        for i, (side, basis) in enumerate(zip(Side, bases, strict=True)):
            if basis is None:
                continue
            never = basis.refreshes.reshape(-1) == 0
            entry = basis._replace(phase=None), moments
            for visit, own in self.visits(never):
                with at(self.products.refresh):
                    entry = refresh_due(
                        jax.jit(functools.partial(visit, side=side)),
                        entry,
                        g.shape[:-2],
                        self.policy.schedule,
                        count,
                        phase=basis.phase,
                        select=own if own is None else lambda due, own=own: due & own,
                        numbers=None if own is never else self.refreshing(side, g).numbers,
                    )
            refreshed, moments = entry
            found[i] = refreshed._replace(phase=basis.phase)
        return (found[0], found[1]), moments, widened(g)


def turned(
    moments: Moments, turn: jax.Array, side: Side, order: jax.Array | None = None
) -> Moments:
    """Moments in a basis that was multiplied by `turn (d, d)`: first moments turn with it.

    Second moments take the new `order` of its columns, if it has one.
    """
    first, second = [], moments.second
    if order is not None:
        second = [v[order] if side is LEFT else v[:, order] for v in second]
    for m in moments.first:
        wide = m.astype(np.promote_types(m.dtype, turn.dtype))
        by, left = turn.astype(wide.dtype), side is LEFT
        found = exact_product(by, wide, transpose_a=True) if left else exact_product(wide, by)
        first.append(found.astype(m.dtype))
    return Moments(first, second)
