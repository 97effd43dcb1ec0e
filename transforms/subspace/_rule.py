"""One subspace of a batch of matrices: how it starts, is refreshed, and what is made in it.

`in_subspace` (`_subspace.py`) puts these together; the mathematics is there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._counts import Counts, counter
from .._guard import usable_or_zero
from .._keys import key_for
from ..directions._carry import Carry, find_moments
from ..kronecker._statistic import has_side
from ..linalg._numerics import power_of_two
from ..linalg._products import gram_of, thin_transposed_times, times_transposed
from ..refresh._due import visit_due
from ..refresh._policy import Every
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
    rejected = counter("rejected")  # refreshes without a usable basis
    skipped = counter("skipped")  # steps without a usable gradient or any basis


class Energies(NamedTuple):
    """Squared norms of the columns of a batch of matrices, zero where they are not usable."""

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

    def is_left(self, x: Any) -> bool:
        """Whether the rows of these matrices are projected."""
        m, n = x.shape[-2:]
        if self.side in ("larger", "std"):
            return m >= n if self.side == "larger" else m < n
        return has_side(self.side, "left", x.shape)

    def orders(self, x: Any) -> tuple[int, int, int]:
        """The projected order, the other one, and the rank."""
        m, n = x.shape[-2:]
        return (*((m, n) if self.is_left(x) else (n, m)), min(self.rank, m, n))

    def like_projected(self, x: Any) -> jax.Array:
        """Zeros like σ."""
        _, columns, rank = self.orders(x)
        shape = (rank, columns) if self.is_left(x) else (columns, rank)
        return jnp.zeros((*x.shape[:-2], *shape), jnp.promote_types(x.dtype, jnp.float32))

    def start(self, x: Any, key: jax.Array) -> Subspace:
        """The subspaces of a batch of matrices before the first step."""
        rows, columns, rank = self.orders(x)
        batch, dtype = x.shape[:-2], jnp.promote_types(x.dtype, jnp.float32)
        record_rank(x.shape[-2:], self.rank, rank, self.is_left(x), self.basis)
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
        """σ, zero for a matrix that is not usable, whether it is, and the energies of columns.

        What is not finite makes σ so too, which is smaller; a compensation sees that of g too.
        Without a basis that was due no gradient is usable: σ may not see what is wrong with it.
        """
        left = self.is_left(g)
        sigma = thin_transposed_times(u, g) if left else g @ u
        inside = total = _squares(sigma, left)
        whole = None
        if self.compensation is not None:
            whole = _squares(g, left)
            # Of a sum of sums XLA would make a sum of its own, and write the squares for both.
            total = inside + whole
        total = total.sum(axis=-1)
        usable = jnp.isfinite(total) & ~(_untried(subspace) & (total > 0))
        usable = usable[..., None]
        inside, whole = jax.tree.map(lambda x: jnp.where(usable, x, 0), (inside, whole))
        usable = usable[..., None]
        return jnp.where(usable, sigma, 0), usable, Energies(inside, whole)

    def check(self, g: jax.Array, subspace: Subspace, number: jax.Array) -> SubspaceCheck:
        """What the finder sees of a single finite matrix, scaled by a power of two."""
        rows, _, rank = self.orders(g)
        exponent = power_of_two(jnp.max(jnp.abs(g)))
        factor = jnp.ldexp(jnp.ones([], g.dtype), -exponent)
        basis = jnp.eye(rows, rank, dtype=g.dtype) if subspace.basis is None else subspace.basis
        return SubspaceCheck(
            gradient=(g if self.is_left(g) else g.mT) * factor,
            basis=basis,
            tracked=None if subspace.tracked is None else subspace.tracked * factor * factor,
            b3=self.b3,
            first=subspace.refreshes == 0,
            key=key_for(subspace.key, number),
        )

    def visited(self, entry: tuple[Any, ...]) -> tuple[Any, ...]:
        """A single matrix's subspace after a refresh, with its moments."""
        subspace, gradient, first, second = entry
        g = usable_or_zero(gradient)  # LAPACK's SVD of an infinite entry may never end
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
            turn = jnp.matmul(used.mT, old, precision=jax.lax.Precision.HIGHEST)

            def followed(rule: Any, moment: jax.Array) -> jax.Array:
                return rule(moment, turn) if self.is_left(g) else rule(moment.mT, turn).mT

            if self.carry.needs_names:
                first, second = (
                    [jnp.where(good, followed(rule, x), x) for x in moments]
                    for rule, moments in ((self.carry.first, first), (self.carry.second, second))
                )
            tracked = subspace.tracked
            if tracked is not None:
                half = self.carry.first(tracked, turn)
                tracked = jnp.where(good, self.carry.first(half.mT, turn), tracked)
            subspace = subspace._replace(basis=used, tracked=tracked)
        counts = subspace.counts.plus(refreshes=good, rejected=~good)
        return subspace._replace(counts=counts), gradient, first, second

    def refreshed(
        self, gradients: Any, state: Any, refresh: Any, count: jax.Array
    ) -> tuple[Any, Any]:
        """The subspaces after the refreshes due at this step, and the inner state that follows."""
        matrices, treedef = jax.tree.flatten(gradients)
        subspaces = treedef.flatten_up_to(state.subspaces)
        leaves, inner_treedef = jax.tree.flatten(state.inner)
        first = second = [()] * len(matrices)
        if self.carry.needs_names:
            first, second = find_moments(state.inner, jax.tree.map(self.like_projected, gradients))
        entries = [
            (subspace, g, [leaves[k] for k in i], [leaves[k] for k in j])
            for subspace, g, i, j in zip(subspaces, matrices, first, second, strict=True)
        ]

        def select(i: int, due: jax.Array) -> jax.Array:
            subspace, g = subspaces[i], matrices[i]
            again = subspace.refreshes == 0
            if isinstance(refresh, Every):
                again = _untried(subspace)
            else:
                sigma, *_ = self.project(g, self.basis_in_use(g, subspace), subspace)
                norm = jnp.linalg.norm(sigma, axis=(-2, -1))
                due &= refresh.renews(norm).reshape(-1)
            return due | again.reshape(-1)

        visited = visit_due(
            self.visited,
            entries,
            [g.shape[:-2] for g in matrices],
            [float(self.orders(g)[0] * self.orders(g)[1] * self.orders(g)[2]) for g in matrices],
            refresh.schedule,
            count,
            select,
        )
        for i, (subspace, _, firsts, seconds) in enumerate(visited):
            subspaces[i] = subspace
            places = (*first[i], *second[i])
            for k, leaf in zip(places, [*firsts, *seconds], strict=True):
                leaves[k] = leaf
        return treedef.unflatten(subspaces), inner_treedef.unflatten(leaves)

    def basis_in_use(self, g: jax.Array, subspace: Subspace) -> jax.Array:
        """U for a batch of matrices: the state's, or drawn from their keys."""
        if subspace.basis is not None:
            return subspace.basis
        rank = self.orders(g)[2]

        def drawn(g: jax.Array, subspace: Subspace) -> jax.Array:
            check = self.check(usable_or_zero(g), subspace, subspace.refreshes - 1)
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
        usable: jax.Array,
        energies: Energies,
        moved: jax.Array,
    ) -> tuple[jax.Array, Subspace]:
        """The direction and the state after it, of a batch of matrices."""
        left = self.is_left(g)
        moved = jnp.where(usable, moved, 0)
        subspace = subspace._replace(counts=subspace.counts.plus(skipped=~usable[..., 0, 0]))
        if subspace.tracked is not None:
            gram = gram_of(sigma, left)
            subspace = subspace._replace(tracked=self.b3 * subspace.tracked + (1 - self.b3) * gram)
        back = functools.partial(self.back, left=left)
        if self.compensation is None:
            return back(u, moved), subspace
        parts = self.parts(g, u, sigma, usable, energies, moved)
        g = jnp.where(usable, g, 0)
        s, state = self.compensation.scales(parts, subspace.compensation)
        subspace = subspace._replace(compensation=state)
        s = jnp.expand_dims(s, -2 if left else -1)
        if self.compensation.residual is None:
            return g * s, subspace
        return back(u, moved - self.compensation.residual * sigma * s) + g * s, subspace

    def back(self, u: jax.Array, x: jax.Array, left: bool) -> jax.Array:
        """What `x` in the subspace is in the whole space."""
        return u @ x if left else times_transposed(x, u)

    def parts(
        self,
        g: jax.Array,
        u: jax.Array,
        sigma: jax.Array,
        usable: jax.Array,
        energies: Energies,
        moved: jax.Array,
    ) -> Parts:
        """The norms that a compensation sees."""
        rows, _, rank = self.orders(g)
        left = self.is_left(g)
        projected, gradient = energies
        assert self.compensation is not None and gradient is not None
        squares = functools.partial(_squares, left=left)
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
            residual = squares(jnp.where(usable, g, 0) - rho * self.back(u, sigma, left))
            low_rank = jnp.sum(squares(self.back(u, moved, left)), axis=-1)
        return Parts(gradient, projected, outside, residual, inner, low_rank, rows - rank)


def _untried(subspace: Subspace) -> jax.Array:
    """Whether a basis was due and there has been none yet."""
    return (subspace.refreshes == 0) & (subspace.rejected > 0)


def _squares(x: jax.Array, left: bool) -> jax.Array:
    """Sums of squares along the projected side."""
    return jnp.sum(x * x, axis=-2 if left else -1)
