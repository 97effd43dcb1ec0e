"""One subspace of a batch of matrices: how it starts, is refreshed, and what is made in it.

`in_subspace` (`_subspace.py`) puts these together; the mathematics is there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._counts import Counts, counter
from .._guard import finite_or_zero
from .._keys import key_for
from .._side import LEFT, Side, side_of
from ..directions._carry import Carry, Moments, put_moments, take_moments
from ..linalg._numerics import HIGHEST, power_of_two
from ..linalg._products import gram_of, thin_transposed_times, times_transposed
from ..refresh._due import refresh_due, untried
from ..refresh._policy import ProjectionCheck, RefreshPolicy, verdict_of
from ._bases import BasisFinder, SubspaceCheck
from ._compensation import Compensation, Parts
from ._rank import record_rank


class SubspaceCounts(Counts):
    """See `Subspace`."""

    names = ("refreshes", "rejected", "skipped")


class Subspace(NamedTuple):
    """The subspace of a batch of matrices; `d` is `m` on the left and `n` on the right."""

    basis: jax.Array | None  # U (..., d, r); None if it is drawn from the key at each step
    tracked: jax.Array | None  # Q̃ (..., r, r), with tracking
    key: jax.Array  # uint32 (..., 2)
    counts: SubspaceCounts
    compensation: Any  # state of the compensation

    refreshes = counter("refreshes")  # bases computed, int32 (...)
    rejected = counter("rejected")  # refreshes that found no basis, or none that is finite
    skipped = counter("skipped")  # steps without a finite gradient or any basis


class Energies(NamedTuple):
    """Squared norms of the columns of a batch of matrices, zero where it is not finite."""

    projected: jax.Array  # of σ (..., n)
    gradient: jax.Array | None  # of G (..., n), if there is a compensation


@dataclasses.dataclass(frozen=True)
class SubspaceRule:
    """The static choices made for all subspaces."""

    rank: int
    basis: BasisFinder
    carry: Carry
    compensation: Compensation | None
    b3: Any  # None without tracking
    side: str

    def side_of(self, x: Any) -> Side:
        """The side of these matrices that is projected."""
        return side_of(self.side, x)

    def orders(self, x: Any) -> tuple[int, int, int]:
        """The projected order, the other one, and the rank."""
        side = self.side_of(x)
        return side.order(x), side.other.order(x), min(self.rank, *x.shape[-2:])

    def like_projected(self, x: Any) -> jax.Array:
        """Zeros like σ."""
        _, columns, rank = self.orders(x)
        shape = (rank, columns) if self.side_of(x) is LEFT else (columns, rank)
        return jnp.zeros((*x.shape[:-2], *shape), jnp.promote_types(x.dtype, jnp.float32))

    def start(self, x: Any, key: jax.Array) -> Subspace:
        """The subspaces of a batch of matrices before the first step."""
        rows, columns, rank = self.orders(x)
        batch, dtype = x.shape[:-2], jnp.promote_types(x.dtype, jnp.float32)
        record_rank(x, self.rank, rank, self.side_of(x), self.basis)
        eye = jnp.eye(rows, rank, dtype=dtype)
        return Subspace(
            basis=jnp.tile(eye, (*batch, 1, 1)) if self.basis.kept else None,
            tracked=None if self.b3 is None else jnp.zeros((*batch, rank, rank), dtype),
            key=key,
            counts=SubspaceCounts.zeros(batch),
            compensation=self.compensation and self.compensation.init(batch, columns, dtype),
        )

    def project(
        self, g: jax.Array, u: jax.Array, subspace: Subspace
    ) -> tuple[jax.Array, jax.Array, Energies]:
        """σ, zero unless it is finite, whether it is, and the energies of columns.

        What is not finite in g makes σ so too, which is smaller; a compensation sees that of g too.
        Where a basis was due and not found, no gradient counts as finite: the identity that stands
        for it may not see what is wrong with g.
        """
        side = self.side_of(g)
        sigma = thin_transposed_times(u, g) if side is LEFT else g @ u
        inside = total = _squares(sigma, side)
        whole = None
        if self.compensation is not None:
            whole = _squares(g, side)
            # Of a sum of sums XLA would make a sum of its own, and write the squares for both.
            total = inside + whole
        total = total.sum(axis=-1)
        finite = jnp.isfinite(total) & ~(untried(subspace) & (total > 0))
        finite = finite[..., None]
        inside, whole = jax.tree.map(lambda x: jnp.where(finite, x, 0), (inside, whole))
        finite = finite[..., None]
        return jnp.where(finite, sigma, 0), finite, Energies(inside, whole)

    def check(self, g: jax.Array, subspace: Subspace, number: jax.Array) -> SubspaceCheck:
        """What the finder sees of a single finite matrix, scaled by a power of two."""
        rows, _, rank = self.orders(g)
        exponent = power_of_two(jnp.max(jnp.abs(g)))
        factor = jnp.ldexp(jnp.ones([], g.dtype), -exponent)
        basis = jnp.eye(rows, rank, dtype=g.dtype) if subspace.basis is None else subspace.basis
        return SubspaceCheck(
            gradient=self.side_of(g).as_rows(g) * factor,
            basis=basis,
            tracked=None if subspace.tracked is None else subspace.tracked * factor * factor,
            b3=self.b3,
            first=subspace.refreshes == 0,
            key=key_for(subspace.key, number),
        )

    def refresh_one(self, entry: tuple[Any, ...]) -> tuple[Any, ...]:
        """A single matrix's subspace after a refresh, with its moments."""
        subspace, gradient, moments = entry
        g = finite_or_zero(gradient)  # LAPACK's SVD of an infinite entry may never end
        good = jnp.any(g != 0)
        if subspace.tracked is not None:
            good |= jnp.any(subspace.tracked != 0)
        if subspace.basis is not None:
            old, rank = subspace.basis, self.orders(g)[2]

            def found() -> jax.Array:
                check = self.check(g, subspace, subspace.refreshes)
                return self.basis.find(check, rank).astype(old.dtype)

            # A parameter whose gradients stay zero is tried at every step: it may cost nothing.
            new = jax.lax.cond(good, found, lambda: old)
            good &= jnp.isfinite(new).all()
            used = jnp.where(good, new, old)
            turn = jnp.matmul(used.mT, old, precision=HIGHEST)
            as_rows = self.side_of(g).as_rows

            def followed(rule: Any, moment: jax.Array) -> jax.Array:
                return jnp.where(good, as_rows(rule(as_rows(moment), turn)), moment)

            if moments is not None:
                moments = Moments(
                    [followed(self.carry.first, x) for x in moments.first],
                    [followed(self.carry.second, x) for x in moments.second],
                )
            tracked = subspace.tracked
            if tracked is not None:
                half = self.carry.first(tracked, turn)
                tracked = jnp.where(good, self.carry.first(half.mT, turn), tracked)
            subspace = subspace._replace(basis=used, tracked=tracked)
        counts = subspace.counts.plus(refreshes=good, rejected=~good)
        return subspace._replace(counts=counts), gradient, moments

    def refreshed(
        self, gradients: Any, state: Any, policy: RefreshPolicy, count: jax.Array
    ) -> tuple[Any, Any]:
        """The subspaces after the refreshes due at this step, and the inner state that follows."""
        projected = jax.tree.map(self.like_projected, gradients)
        moments = jax.tree.map(lambda _: None, gradients)
        if self.carry.needs_names:
            moments = take_moments(state.inner, projected)

        def select(entry: tuple[Any, ...], due: jax.Array) -> jax.Array:
            subspace, g, _ = entry
            if policy.examines is not None:
                due &= self.examined(policy, g, subspace)
            return due | untried(subspace).reshape(-1)

        together = lambda g, subspace, moments: (subspace, g, moments)  # noqa: E731
        entries = jax.tree.map(together, gradients, state.subspaces, moments)
        costs = jax.tree.map(lambda g: float(math.prod(self.orders(g))), gradients)
        entries = refresh_due(
            self.refresh_one, gradients, entries, costs, policy.schedule, count, select
        )
        subspaces = jax.tree.map(lambda _, entry: entry[0], gradients, entries)
        if not self.carry.needs_names:
            return subspaces, state.inner
        moments = jax.tree.map(lambda _, entry: entry[2], gradients, entries)
        return subspaces, put_moments(state.inner, projected, moments)

    def examined(self, policy: RefreshPolicy, g: jax.Array, subspace: Subspace) -> jax.Array:
        """Which of a batch of matrices the policy refreshes, bool (size,)."""
        sigma, *_ = self.project(g, self.basis_in_use(g, subspace), subspace)
        norm = jnp.linalg.norm(sigma, axis=(-2, -1))

        def asked(norm: jax.Array, first: jax.Array) -> jax.Array:
            return jnp.asarray(verdict_of(policy, ProjectionCheck(norm, first)).refresh)

        return jax.vmap(asked)(norm.reshape(-1), (subspace.refreshes == 0).reshape(-1))

    def basis_in_use(self, g: jax.Array, subspace: Subspace) -> jax.Array:
        """U for a batch of matrices: the state's, or drawn from their keys."""
        if subspace.basis is not None:
            return subspace.basis
        rank = self.orders(g)[2]

        def drawn(g: jax.Array, subspace: Subspace) -> jax.Array:
            check = self.check(finite_or_zero(g), subspace, subspace.refreshes - 1)
            return self.basis.find(check, rank)

        for _ in g.shape[:-2]:
            drawn = jax.vmap(drawn)
        return drawn(g, subspace)

    def combined(
        self,
        g: jax.Array,
        subspace: Subspace,
        u: jax.Array,
        sigma: jax.Array,
        finite: jax.Array,
        energies: Energies,
        moved: jax.Array,
    ) -> tuple[jax.Array, Subspace]:
        """The direction and the state after it, of a batch of matrices."""
        side = self.side_of(g)
        moved = jnp.where(finite, moved, 0)
        subspace = subspace._replace(counts=subspace.counts.plus(skipped=~finite[..., 0, 0]))
        if subspace.tracked is not None:
            gram = gram_of(sigma, side)
            subspace = subspace._replace(tracked=self.b3 * subspace.tracked + (1 - self.b3) * gram)
        back = functools.partial(self.back, side=side)
        if self.compensation is None:
            return back(u, moved), subspace
        parts = self.parts(g, u, sigma, finite, energies, moved)
        g = jnp.where(finite, g, 0)
        s, state = self.compensation.scales(parts, subspace.compensation)
        subspace = subspace._replace(compensation=state)
        s = jnp.expand_dims(s, side.axis)
        if self.compensation.residual is None:
            return g * s, subspace
        return back(u, moved - self.compensation.residual * sigma * s) + g * s, subspace

    def back(self, u: jax.Array, x: jax.Array, side: Side) -> jax.Array:
        """What `x` in the subspace is in the whole space."""
        return u @ x if side is LEFT else times_transposed(x, u)

    def parts(
        self,
        g: jax.Array,
        u: jax.Array,
        sigma: jax.Array,
        finite: jax.Array,
        energies: Energies,
        moved: jax.Array,
    ) -> Parts:
        """The norms that a compensation sees."""
        rows, _, rank = self.orders(g)
        side = self.side_of(g)
        projected, gradient = energies
        assert self.compensation is not None and gradient is not None
        squares = functools.partial(_squares, side=side)
        inner = squares(moved)
        outside = gradient - projected
        noise = jnp.abs(outside) <= rows * jnp.finfo(g.dtype).eps * gradient
        outside = jnp.where(noise, 0, outside)
        rho = self.compensation.residual
        if rho is None:
            residual = low_rank = jnp.zeros_like(gradient)
        elif self.basis.orthonormal:
            residual = jnp.maximum(outside, 0) + (1 - rho) ** 2 * projected
            low_rank = jnp.sum(inner, axis=-1)
        else:
            residual = squares(jnp.where(finite, g, 0) - rho * self.back(u, sigma, side))
            low_rank = jnp.sum(squares(self.back(u, moved, side)), axis=-1)
        return Parts(gradient, projected, outside, residual, inner, low_rank, rows - rank)


def _squares(x: jax.Array, side: Side) -> jax.Array:
    """Sums of squares along the projected side."""
    return jnp.sum(x * x, axis=side.axis)
