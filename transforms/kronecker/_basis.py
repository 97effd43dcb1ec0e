"""The eigenbases of one side of a batch of matrices, and the moments that turn with them.

Averaged eigenvalues that are not finite (of a damaged state) start anew at the next step, because
those of one side make the other's.
"""

from __future__ import annotations

import dataclasses
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
from ..linalg._loops import in_turn, visit_all
from ..linalg._numerics import magnitude
from ..linalg._products import at, exact_product
from ..refresh._policy import Check, verdict_of
from ._methods import METHODS, Qr
from ._statistic import Pair, SideRule, identity
from ._whitened import inverse_roots, starting_multiple


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


@dataclasses.dataclass(frozen=True)
class BasisRule(SideRule):
    """The settings of the bases of both sides."""

    carries = True

    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None
    ) -> Basis:
        """The initial bases of a batch: identities."""
        eye, examined = identity(order, dtype), self.policy.examines is not None
        statistic = self.statistics.encode_factor(self.initial * eye, None)
        one = statistic, self.storage.encode_basis(eye, None)
        # Encoding them all would take the memory of decoded matrices, and longer programs.
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), one)
        return Basis(
            *each,
            eigenvalues=jnp.zeros((*batch, order), dtype) if examined else None,
            spectrum=jnp.full((*batch, order), self.initial, dtype) if self.whiten else None,
            proxy=jnp.zeros(batch, jnp.float32) if examined else None,
            counts=BasisCounts.zeros(batch),
            phase=phase,
        )

    def entered(self, g: jax.Array, bases: Pair, count: jax.Array) -> jax.Array:
        """The gradient in the bases in use."""

        def rotated(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            return self.rotated(x, self.opened(x, stored))

        wide = widened(g)
        stored = [basis and basis.basis for basis in bases]
        numbers = self.numbers(g, stored)
        return visit_all(rotated, wide, g.shape[:-2], count, numbers, stored)

    def whitened(
        self, g: jax.Array, seen: jax.Array, bases: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Pair]:
        """`G U_R μ^(-1/2) / √n` and `λ^(-1/2) U_Lᵀ G / √m` for the statistics of both sides.

        Also their start, and bases with new eigenvalues. If statistics are kept in the bases,
        `seen` is `U_Lᵀ G U_R`: of the left Gram matrix `U_R` cancels, of the right one `U_L`.
        """
        dtype = np.promote_types(g.dtype, np.float32)
        sides = sum(basis is not None for basis in bases)
        start = starting_multiple(g, max(1, sides), self.initial, dtype)

        def by_side(given: Any, stored: Sequence[Any]) -> Any:
            x, *_ = given
            left, right = self.opened(x, stored)
            with jax.default_matmul_precision("highest"):
                rows, columns = (self.rotated(x, own) for own in ((left, None), (None, right)))
                both = self.rotated(rows, (None, right))
            return rows, columns, both

        entry = (seen.astype(dtype),) * 3
        if not self.in_bases:
            stored = [basis and basis.basis for basis in bases]
            numbers = self.numbers(g, stored)
            entry = visit_all(by_side, entry, g.shape[:-2], count, numbers, stored)
        rows, columns, both = entry

        found, old, scales = [*bases], [], []
        for i, (side, basis) in enumerate(zip(Side, bases, strict=True)):
            d = jnp.ones((*both.shape[:-2], side.order(both)), dtype)
            if basis is not None:
                damaged = ~jnp.isfinite(basis.spectrum).all(axis=-1)
                empty = ~jnp.any(basis.spectrum != 0, axis=-1) | damaged
                d = jnp.where(empty[..., None], start[..., None], basis.spectrum)
                found[i] = basis._replace(counts=basis.counts.plus(restarted=damaged))
            old.append(d)
            scales.append(jnp.expand_dims(inverse_roots(d), side.other_axis))
        by_left, by_right = scales
        m, n = g.shape[-2:]
        sources = columns * by_right / n**0.5, rows * by_left / m**0.5
        squares = both**2
        for i, (side, other) in enumerate(zip(Side, (by_right, by_left), strict=True)):
            if found[i] is not None:
                mean = jnp.mean(squares * other**2, axis=side.other_axis)
                new = self.b2 * old[i] + (1 - self.b2) * mean
                # As with statistics: a gradient that is not finite leaves the average as it is.
                finite = jnp.isfinite(new).all(axis=-1, keepdims=True)
                spectrum = jnp.where(finite, new, old[i]).astype(dtype)
                found[i] = found[i]._replace(spectrum=spectrum)
        return sources, start, (found[0], found[1])

    def opened(self, x: jax.Array, stored: Sequence[Any]) -> list[Any]:
        """Stored bases of the sides of `x (..., m, n)`, read for `rotated`."""
        with at(self.products.step):
            return [
                None if own is None else self.storage.open_basis(own, x.shape[side.other_axis])
                for side, own in zip(Side, stored, strict=True)
            ]

    def rotated(self, x: jax.Array, opened: Sequence[Any], back: bool = False) -> jax.Array:
        """`U_Lᵀ x U_R` or, `back`, `U_L x U_Rᵀ`, in the dtype of `x`."""

        def by_side(x: jax.Array, opened: Sequence[Any]) -> jax.Array:
            work = x
            with at(self.products.step):
                for side, own in zip(Side, opened, strict=True):
                    work = work if own is None else self.storage.rotate(own, work, side, back)
            return work.astype(x.dtype)

        return in_turn(by_side, x, opened)

    def visits(self) -> list[tuple[Callable[..., Any], bool | None]]:
        """An iteration starts from eigenvectors."""
        if isinstance(self.method, Qr):
            first = dataclasses.replace(self, method=METHODS["eigh"])
            return [(first.refresh_one, True), (self.refresh_one, False)]
        return [(self.refresh_one, None)]

    def refresh_one(
        self, entry: tuple[Basis, Moments], given: None, side: Side | None
    ) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        del given
        basis, moments = entry
        statistic = self.statistics.decode_factor(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound, in_order = jnp.isfinite(magnitude(statistic)), jnp.arange(len(old))
        never_refreshed = basis.refreshes == 0
        refresh, proxy, eigenvalues = jnp.bool_(True), basis.proxy, basis.eigenvalues
        if eigenvalues is not None:
            anew = never_refreshed | ~jnp.isfinite(eigenvalues).all()
            check = Check(statistic, old, eigenvalues, anew)
            refresh, proxy, *_ = verdict_of(self.policy, check, proxy)

        def again(u: jax.Array) -> jax.Array:
            check = Check(statistic, u, rayleigh(statistic, u), jnp.bool_(False))
            return verdict_of(self.policy, check).refresh

        def renewed() -> tuple[Any, jax.Array, jax.Array]:
            """The basis, stored; its columns' new order; and whether it is finite."""
            if isinstance(self.method, Qr):
                new, order = refined_basis(statistic, old, self.method.steps, again)
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
            lambda: turned_moments(
                moments, exact_product(old, used, transpose_a=True), side, order
            ),
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
        return basis._replace(
            statistic=self.kept_statistic(sound, basis.statistic, statistic),
            spectrum=spectrum,
            basis=jax.tree.map(lambda a, b: jnp.where(changed, a, b), stored, basis.basis),
            eigenvalues=eigenvalues,
            proxy=proxy,
            counts=basis.counts.plus(checks=1, refreshes=changed, rejected=~good, restarted=~sound),
        ), moments


def turned_moments(
    moments: Moments, turn: jax.Array, side: Side | None, order: jax.Array | None = None
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
