"""The subspaces of a batch of matrices: initialization, refresh, projection and back-projection.

`in_subspace` (`_subspace.py`) combines these steps; its module docstring has the mathematics, the
numerics and the cost. Products with a basis take whole stacks, on TPUs too, where loops over
matrices would move twice the bytes. Algorithm 4 in comments is that of Gong et al.,
arXiv:2502.07752.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Carry, Moments, put_moments, take_moments
from .._counts import counter, counters
from .._guard import all_finite, is_finite, where_finite
from .._recording import instead, record_rank
from .._side import LEFT, Side, side_of
from .._stacks import key_for
from .._trees import widened
from ..linalg._loops import at_most_once, in_turn
from ..linalg._numerics import declared, magnitude, to_one
from ..linalg._products import exact_product, gram
from ..refresh._due import Refreshing, refresh_due, untried
from ..refresh._policy import ProjectionCheck, RefreshPolicy, verdict_of
from ._bases import BasisFinder, SubspaceCheck, Switched
from ._compensation import Compensation, Parts

NOISE = 4.0
"""An entry of σ up to this multiple of `√d eps` times the length of its column of G is rounding
noise: three times the largest one outside of gradients of rank 1 and 4, of orders 2 to 200. Where
no compensation reads G again, the length is that of the column of σ, which is at most as long."""


@counters
class SubspaceCounts(NamedTuple):
    """Counters of `Subspace`."""

    value: Any
    names = ("refreshes", "rejected", "skipped", "restarted", "damaged")


class Subspace(NamedTuple):
    """The subspaces of a batch of matrices; `d` is `m` on the left and `n` on the right."""

    basis: jax.Array | None  # U (..., d, r); None if each step draws it from the key
    tracked: jax.Array | None  # Q̃ (..., r, r), with tracking
    key: jax.Array  # uint32 (..., 2)
    counts: SubspaceCounts
    compensation: Any  # state of the compensation
    phase: jax.Array | None = None  # when it is due, int32 (...), if staggered

    refreshes = counter("refreshes")  # bases computed, int32 (...)
    rejected = counter("rejected")  # refreshes that found no finite basis
    skipped = counter("skipped")  # steps without a finite gradient or without a basis
    restarted = counter("restarted")  # how often the matrix's state started anew
    damaged = counter("damaged")  # 1 if it will at this step


class Projected(NamedTuple):
    """Gradients and their projections; energies are squared column norms, `None` if unused."""

    gradient: jax.Array  # G (..., m, n)
    basis: jax.Array  # U (..., d, r)
    sigma: jax.Array  # (..., r, n), zero where not finite
    finite: jax.Array  # bool (..., 1, 1)
    inside: jax.Array | None  # energies of σ (..., n)
    whole: jax.Array | None  # energies of G (..., n)


@dataclasses.dataclass(frozen=True)
class SubspaceRule:
    """The static configuration of all subspaces."""

    rank: int
    basis: BasisFinder
    carry: Carry
    compensation: Compensation | None
    b3: Any  # None without tracking
    side: str
    dtype: Any = None  # in which bases are stored; None is float32 at least

    def side_of(self, x: Any) -> Side:
        return side_of(self.side, x)

    def orders(self, x: Any) -> tuple[int, int, int]:
        """The order of the projected side, the order of the other side, and the rank."""
        side = self.side_of(x)
        return side.order(x), side.other.order(x), min(self.rank, *x.shape[-2:])

    def projected_shape(self, x: Any) -> tuple[int, ...]:
        _, columns, rank = self.orders(x)
        return (*x.shape[:-2], *((rank, columns) if self.side_of(x) is LEFT else (columns, rank)))

    def start(self, x: Any, key: jax.Array, phase: jax.Array | None = None) -> Subspace:
        """The initial subspaces of a batch of matrices."""
        rows, columns, rank = self.orders(x)
        batch, dtype = x.shape[:-2], np.promote_types(x.dtype, np.float32)
        where = self.side_of(x).value
        if isinstance(self.basis, Switched):
            stay = self.basis.stay(rank, rows)
            where += f", leading {instead(stay, self.basis.leading)}"
        record_rank(x, self.rank, rank, where)
        eye = jnp.eye(rows, rank, dtype=dtype)
        return Subspace(
            basis=jnp.tile(eye, (*batch, 1, 1)) if self.basis.kept else None,
            tracked=None if self.b3 is None else jnp.zeros((*batch, rank, rank), dtype),
            key=key,
            counts=SubspaceCounts.zeros(batch),
            phase=phase,
            compensation=self.compensation and self.compensation.init(batch, columns, dtype),
        )

    def project(self, g: jax.Array, u: jax.Array, subspace: Subspace) -> Projected:
        """σ without rounding noise, whether each matrix is finite, and the column energies.

        Noise is an entry within its own rounding (`NOISE`), and a row within that of a rounded
        basis. A bad entry of g makes σ not finite, which is the smaller array to check. Without a
        first basis only sums of 0 count as finite: the identity may miss bad entries.
        """
        side = self.side_of(g)
        # A thin transpose: XLA for CPUs has no fast kernel for a first factor summed over its rows.
        sigma = u.mT @ g if side is LEFT else g @ u  # Alg. 4, line 11
        lengths = _read_once(jnp.sum(sigma * sigma, axis=side.other_axis, keepdims=True))
        total = jnp.sum(lengths, axis=side.axis, keepdims=True)
        # Adam would raise the rounding noise of a direction in which g is zero to its own length.
        compensation, inside, whole = self.compensation, None, None
        squares = _squares(sigma, side) if compensation is None else _read_once(_squares(g, side))
        eps = NOISE * side.order(g) ** 0.5 * float(jnp.finfo(g.dtype).eps)
        noise = eps * jnp.expand_dims(jnp.sqrt(squares), side.axis)
        of_basis = self._basis_noise(g) ** 2 * total
        sigma = jnp.where((jnp.abs(sigma) < noise) | (lengths < of_basis), 0, sigma)  # NaN stays
        if compensation is not None:
            inside, whole = _squares(sigma, side), squares
            if compensation.residual is not None:
                total = total + whole.sum(axis=-1)[..., None, None]
        finite = jnp.isfinite(total) & ~(untried(subspace)[..., None, None] & (total > 0))
        columns = finite[..., 0]
        inside, whole = jax.tree.map(lambda x: jnp.where(columns, x, 0), (inside, whole))
        return Projected(g, u, jnp.where(finite, sigma, 0), finite, inside, whole)

    def _basis_noise(self, g: jax.Array) -> float:
        """The length of a row of σ that the rounding of a stored basis leaves, relative to ‖G‖."""
        # Independent errors make half a unit times `‖G‖ / √(3 · order)`; 4√3 is a margin.
        if self.dtype is None or not self.basis.kept or self.dtype == g.dtype:
            return 0.0
        return float(jnp.finfo(self.dtype).eps) / self.side_of(g).order(g) ** 0.5

    def check(
        self, g: jax.Array, size: jax.Array, subspace: Subspace, number: Any, first: Any = None
    ) -> SubspaceCheck:
        """The finder's input for a single finite matrix, scaled by the power of two of `size`."""
        rows, _, rank = self.orders(g)
        factor = to_one(size)
        basis = jnp.eye(rows, rank, dtype=g.dtype) if subspace.basis is None else subspace.basis
        return SubspaceCheck(
            gradient=self.side_of(g).as_rows(g) * factor,
            basis=basis,
            tracked=None if subspace.tracked is None else subspace.tracked * factor * factor,
            b3=self.b3,
            first=subspace.refreshes == 0 if first is None else jnp.bool_(first),
            key=key_for(subspace.key, number),
        )

    def refresh_one(
        self, entry: tuple[Subspace, Any], inputs: tuple[Any, ...], first: bool | None = None
    ) -> tuple[Any, ...]:
        """Refreshes a single matrix's subspace, for the `first` time if known; carries moments."""
        (subspace, moments), (gradient, key) = entry, inputs
        g, subspace = widened(gradient), subspace._replace(key=key)
        finite, size = is_finite(g, axis=None), magnitude(g)
        good, sound, old = finite & (size > 0), jnp.bool_(True), subspace.basis
        if subspace.tracked is not None:
            tracked = magnitude(subspace.tracked)
            sound = jnp.isfinite(tracked)
            subspace = subspace._replace(tracked=jnp.where(sound, subspace.tracked, 0))
            good |= sound & (tracked > 0)

        def new_basis() -> jax.Array:
            assert old is not None
            # Here, not before the condition: XLA would write it out, and then its multiple.
            safe = jnp.where(finite, g, 0)  # LAPACK's SVD may not end on infinite entries
            check = self.check(
                safe, jnp.where(finite, size, 0), subspace, subspace.refreshes, first
            )
            return self.basis.find(check, self.orders(g)[2]).astype(old.dtype)

        if old is not None:
            # A parameter whose gradients stay zero tries again at every step; that must be free.
            new = jax.lax.cond(good, new_basis, lambda: old)
            good &= jnp.isfinite(magnitude(new))
            used = jnp.where(good, new, old)
            subspace, moments = self._moved(used, good, self.side_of(g), subspace, moments)
        counts = subspace.counts.plus(refreshes=good, rejected=~good, restarted=~sound)
        return subspace._replace(key=None, counts=counts), moments

    def _moved(
        self, basis: jax.Array, good: jax.Array, side: Side, subspace: Subspace, moments: Any
    ) -> tuple[Subspace, Any]:
        """A single matrix's subspace and moments in another basis, if it is good."""
        assert subspace.basis is not None
        turn = exact_product(basis.mT, subspace.basis)

        def followed(rule: Any, moment: jax.Array) -> jax.Array:
            return jnp.where(good, side.as_rows(rule(side.as_rows(moment), turn)), moment)

        if moments is not None:
            moments = Moments(
                [followed(self.carry.first, x) for x in moments.first],
                [followed(self.carry.second, x) for x in moments.second],
            )
        tracked = subspace.tracked
        if tracked is not None:
            half = self.carry.first(tracked, turn)
            tracked = jnp.where(good, self.carry.first(half.mT, turn), tracked)
        return subspace._replace(basis=basis, tracked=tracked), moments

    def refreshing(self, x: Any) -> Refreshing:
        """What it takes to refresh one subspace of `x (..., m, n)`."""
        return Refreshing(float(math.prod(self.orders(x))), max(x.shape[-2:]) ** 2)

    def refreshed(
        self, g: jax.Array, state: Any, policy: RefreshPolicy, count: jax.Array
    ) -> tuple[Subspace, Any]:
        """Runs the refreshes due at this step; returns the subspaces and the new inner state."""
        moments = take_moments(state.inner) if self.carry.needs_names else None
        old = state.subspace
        asked: Any = True if policy.examines is None else self.examined(policy, g, old)
        # Of the state a refresh leaves the key, the phase and the compensation as they are.
        entry = old._replace(key=None, phase=None, compensation=None), moments
        together = self.refreshing(g).numbers
        rounds: list[Any] = [(None, True, together)]
        if self.basis.starts:
            never = (old.refreshes == 0).reshape(-1)
            rounds = [(True, never, None), (False, ~never, together)]
        for first, among, numbers in rounds:
            entry = refresh_due(
                jax.jit(functools.partial(self.refresh_one, first=first)),
                entry,
                g.shape[:-2],
                policy.schedule,
                count,
                old,
                inputs=(g, old.key),
                asked=asked,
                among=among,
                numbers=numbers,
            )
        subspace, moments = entry
        subspace = subspace._replace(key=old.key, phase=old.phase, compensation=old.compensation)
        return subspace, state.inner if moments is None else put_moments(state.inner, moments)

    def examined(self, policy: RefreshPolicy, g: jax.Array, subspace: Subspace) -> jax.Array:
        """Which matrices of a batch the policy refreshes, bool (size,)."""
        g = widened(g)
        projected = self.project(g, self.basis_in_use(g, subspace), subspace)
        norm = jnp.linalg.norm(projected.sigma, axis=(-2, -1))

        def asked(norm: jax.Array, first: jax.Array) -> jax.Array:
            return jnp.asarray(verdict_of(policy, ProjectionCheck(norm, first)).refresh)

        return jax.vmap(asked)(norm.reshape(-1), (subspace.refreshes == 0).reshape(-1))

    def basis_in_use(self, g: jax.Array, subspace: Subspace) -> jax.Array:
        """U for a batch of matrices: from the state, or drawn from their keys."""
        if subspace.basis is not None:
            return subspace.basis

        def drawn(g: jax.Array, subspace: Subspace) -> jax.Array:
            g = where_finite(is_finite(g), g)
            number = subspace.refreshes - 1
            return self.basis.find(self.check(g, magnitude(g), subspace, number), self.orders(g)[2])

        for _ in g.shape[:-2]:
            drawn = jax.vmap(drawn)
        return drawn(g, subspace)

    def combined(
        self, projected: Projected, subspace: Subspace, moved: jax.Array
    ) -> tuple[jax.Array, Subspace]:
        """The directions of a batch of matrices, zero where not finite, and the state."""
        g, u, sigma, finite, *_ = projected
        side = self.side_of(g)
        moved = jnp.where(finite, moved, 0)
        each = finite[..., 0, 0]
        sound = every = jnp.ones_like(each)
        if subspace.basis is not None:  # all are finite if all projections are
            sound = jax.lax.cond(declared(each).all(), lambda u: every, all_finite, subspace.basis)
        good = sound & all_finite(moved)
        if subspace.tracked is not None:
            square = in_turn(functools.partial(gram, side=side), sigma)
            tracked = self.b3 * subspace.tracked + (1 - self.b3) * square  # Alg. 4, line 12
            subspace = subspace._replace(tracked=tracked)
        inside, s = moved, None
        if self.compensation is not None:
            parts = self.column_norms(projected, moved)
            s, state = self.compensation.scales(parts, subspace.compensation)  # line 16
            subspace = subspace._replace(compensation=state)
            good &= jnp.isfinite(s).all(axis=-1)
            s = jnp.expand_dims(s, side.axis)
            rho = self.compensation.residual
            inside = None if rho is None else moved - rho * sigma * s
        counts = subspace.counts.plus(skipped=~each, **subspace.counts.flags(~good))
        # A choice by matrix cannot be part of the products of GPUs and TPUs: it would be one more
        # pass over a factor or the result. The loop has no rounds if all is finite.
        good = finite & good[..., None, None]
        kept = (sound[..., None, None], good)
        u, (inside, s) = at_most_once(_zeroed, ~declared(good).all(), kept, (u, (inside, s)))
        basis = None if subspace.basis is None else u
        subspace = subspace._replace(basis=basis, counts=counts)
        direction = None if inside is None else self.back(u, inside, side)
        if s is not None:
            outside = jnp.where(finite, g, 0) * s
            direction = outside if direction is None else direction + outside  # line 17
        assert direction is not None
        return direction, subspace

    def back(self, u: jax.Array, x: jax.Array, side: Side) -> jax.Array:
        return u @ x if side is LEFT else jnp.einsum("...mr,...nr->...mn", x, u)

    def column_norms(self, projected: Projected, moved: jax.Array) -> Parts:
        """The norms that a compensation takes."""
        g, u, sigma, finite, inside, whole = projected
        rows, _, rank = self.orders(g)
        side = self.side_of(g)
        assert self.compensation is not None and inside is not None and whole is not None
        squares = functools.partial(_squares, side=side)
        inner = squares(moved)
        outside = whole - inside
        noise = max(rows * float(jnp.finfo(g.dtype).eps), self._basis_noise(g))
        outside = jnp.where(jnp.abs(outside) <= noise * whole, 0, outside)
        rho = self.compensation.residual
        if rho is None:
            residual = low_rank = jnp.zeros_like(whole)
        elif self.basis.orthonormal:
            residual = jnp.maximum(outside, 0) + (1 - rho) ** 2 * inside
            low_rank = jnp.sum(inner, axis=-1)
        else:
            residual = squares(jnp.where(finite, g, 0) - rho * self.back(u, sigma, side))
            low_rank = jnp.sum(squares(self.back(u, moved, side)), axis=-1)
        return Parts(whole, inside, outside, residual, inner, low_rank, rows - rank, rank)


def _read_once(sums: jax.Array) -> jax.Array:
    """XLA would read all summands again for a sum of these sums."""
    return jax.lax.optimization_barrier(sums)


def _zeroed(kept: tuple[jax.Array, ...], trees: tuple[Any, ...]) -> tuple[Any, ...]:
    """Trees of arrays `(N, ...)`, zero for the matrices that each is not to keep."""
    return tuple(
        jax.tree.map(lambda x, ok=ok: jnp.where(ok, x, 0), tree)
        for ok, tree in zip(kept, trees, strict=True)
    )


def _squares(x: jax.Array, side: Side) -> jax.Array:
    """Sums of squares along the projected side."""
    return jnp.sum(x * x, axis=side.axis)
