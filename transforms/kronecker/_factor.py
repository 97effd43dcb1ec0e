"""One Kronecker factor: its statistic, its inverse root, and the refresh of the root."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._counts import counter, counters
from .._side import LEFT, RIGHT, Side
from ..directions._carry import Moments
from ..linalg._eigh import eigh, from_eigen, is_indefinite
from ..linalg._inverse_root import root_eigenvalues, rounding_floor, solve_root
from ..linalg._numerics import HIGHEST, magnitude
from ..linalg._products import multiplied
from ..refresh._policy import Check, RootDamping, verdict_of
from ..storage._storage import dense
from ._noise import eigenvalue_floor
from ._statistic import Pair, SideRule, identity
from ._whitened import starting_multiple


@counters
class FactorCounts(NamedTuple):
    """The counters of a `Factor`."""

    value: Any
    names = ("checks", "refreshes", "indefinite", "rejected", "restarted")


class Factor(NamedTuple):
    """The preconditioners of one side of a batch of matrices; their order `d` is `m` or `n`."""

    statistic: Any  # L or R, (..., d, d) in stored form
    inverse_root: Any  # in use, (..., d, d) in stored form
    eigenvectors: (
        Any  # Q of the last refresh, (..., d, d), if the policy examines it or it is tracked
    )
    eigenvalues: jax.Array | None  # their undamped eigenvalues, (..., d)
    damping: jax.Array | None  # ε in use, (...), if the policy examines anything
    proxy: jax.Array | None  # its last figure, such as FOAM's h, float32 (...)
    # The solver's error estimate, or of tracked bases the rest off the diagonal, float32 (...);
    # None if the policy examines factors whose bases are not tracked.
    error: jax.Array | None
    counts: FactorCounts
    phase: jax.Array | None = None  # when it is due, int32 (...), if staggered

    checks = counter("checks")  # times the factor was due, int32 (...)
    refreshes = counter("refreshes")  # inverse roots recomputed
    indefinite = counter("indefinite")  # refreshes whose statistic had a negative eigenvalue
    rejected = counter("rejected")  # checks with a zero or non-finite statistic or root
    restarted = counter("restarted")  # checks whose statistic was not finite and started anew


@dataclasses.dataclass(frozen=True)
class FactorRule(SideRule):
    """The settings of the factors of both sides."""

    root: int
    eps: Any
    damping_mode: str
    sides: int  # how many roots a matrix is multiplied by

    @property
    def has_exact_eigenpairs(self) -> bool:
        """Whether directions may be computed from them, as from the roots."""
        kept = self.policy.examines is not None and self.method == "eigh"
        return kept and self.sides == 2 and self.storage == dense()

    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None
    ) -> Factor:
        """The initial factors of a batch; their roots and bases are identities."""
        eye = identity(order, dtype)
        examined, vectors = self.policy.examines is not None, None
        if self.in_bases:
            vectors = self.storage.encode_basis(eye, None)
        elif examined:
            vectors = jnp.copy(eye)
        statistic = self.statistics.encode_factor(self.initial * eye, None)
        one = statistic, self.storage.encode_root(eye), vectors
        # Encoding them all would take the memory of decoded matrices, and longer programs.
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), one)
        return Factor(
            *each,
            eigenvalues=jnp.zeros((*batch, order), dtype) if examined else None,
            damping=jnp.full(batch, self.eps, dtype) if examined else None,
            proxy=jnp.zeros(batch, jnp.float32) if examined else None,
            error=jnp.zeros(batch, jnp.float32) if self.in_bases or not examined else None,
            counts=FactorCounts.zeros(batch),
            phase=phase,
        )

    def apply_root(
        self, stored: Any, x: jax.Array, side: Side, precision: jax.lax.PrecisionLike = None
    ) -> jax.Array:
        """The product of a stored root with `x (..., m, n)`, on this side."""
        root = self.storage.decode_root(stored)
        x = x.astype(root.dtype)
        precision = self.products.step or precision
        return multiplied(*((root, x) if side is LEFT else (x, root)), precision)

    def whitened(
        self, g: jax.Array, factors: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """`G R^(-1/2) / √n` and `L^(-1/2) G / √m`, which statistics average, and their start.

        A side without a root counts as the start, a side without a factor as the identity.
        """
        dtype = np.promote_types(g.dtype, np.float32)
        start = starting_multiple(g, self.sides, self.initial, dtype)
        exact, size = functools.partial(self.apply_root, precision=HIGHEST), jnp.sqrt(start)
        inverse = jnp.where(size == 0, 0, 1 / jnp.where(size == 0, 1, size))[..., None, None]

        def by(side: Side) -> jax.Array:
            work, factor = g.astype(dtype), factors[side is RIGHT]
            if factor is not None:
                roots = [factor.inverse_root if own is side else None for own in Side]
                rooted = self.two_sided(exact, work, roots, count)
                work = jnp.where((factor.refreshes > 0)[..., None, None], rooted, work * inverse)
            return work / side.order(g) ** 0.5

        return (by(RIGHT), by(LEFT)), start

    def refresh_one(
        self, entry: tuple[Factor, Moments], given: None, side: Side | None
    ) -> tuple[Factor, Moments]:
        """Checks a single factor, follows the policy's verdict and counts it."""
        del given, side
        factor, moments = entry
        statistic = self.statistics.decode_factor(factor.statistic)
        floor: Any = rounding_floor(statistic, self.root, self.sides)
        if self.has_exact_eigenpairs:
            floor = eigenvalue_floor(statistic.dtype)
        size = magnitude(statistic)
        sound = jnp.isfinite(size)

        def solved() -> tuple[Factor, jax.Array, jax.Array, jax.Array]:
            if self.policy.examines is not None:
                x, new, refresh, indefinite = self._examined(factor, statistic, floor)
            else:
                found = solve_root(
                    statistic, self.root, self.eps, self.damping_mode, self.method, floor
                )
                new = factor._replace(error=found.error.astype(jnp.float32))
                x, refresh, indefinite = found.inverse_root, jnp.bool_(True), found.indefinite
            good = jnp.isfinite(magnitude(x)) & sound
            new = new._replace(inverse_root=self.storage.encode_root(x))
            return new, good, refresh, indefinite

        def nothing() -> tuple[Factor, jax.Array, jax.Array, jax.Array]:
            return factor, jnp.bool_(False), jnp.bool_(False), jnp.bool_(False)

        # All-zero statistics produce no root: it would consist of damping alone.
        new, good, refresh, indefinite = jax.lax.cond(size > 0, solved, nothing)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, factor)
        counts = factor.counts.plus(
            checks=1,
            refreshes=refresh & good,
            indefinite=indefinite & good,
            rejected=~good,
            restarted=~sound,
        )
        return kept._replace(
            statistic=self.kept_statistic(sound, factor.statistic, statistic),
            proxy=jax.tree.map(lambda a, b: jnp.where(sound, a, b), new.proxy, factor.proxy),
            counts=counts,
        ), moments

    def _examined(
        self, factor: Factor, statistic: jax.Array, floor: jax.typing.ArrayLike
    ) -> tuple[jax.Array, Factor, jax.Array, jax.Array]:
        """The root that the policy asks for, the factor, and whether it is new or indefinite."""
        q, d, damping = factor.eigenvectors, factor.eigenvalues, factor.damping
        assert d is not None and damping is not None
        damaged = ~jnp.isfinite(jnp.stack([magnitude(x) for x in (q, d, damping)])).all()
        first = (factor.refreshes == 0) | damaged
        own = RootDamping(damping.astype(statistic.dtype), self.eps, self.root)
        verdict = verdict_of(self.policy, Check(statistic, q, d, first, own), factor.proxy)
        refresh, proxy, new, kept = verdict
        q, d = jax.lax.cond(refresh, eigh, lambda _: (q, kept), statistic)
        assert new is not None
        x = from_eigen(q, root_eigenvalues(d, self.root, new, floor=floor))
        factor = factor._replace(
            eigenvectors=q, eigenvalues=d, damping=new.astype(damping.dtype), proxy=proxy
        )
        return x, factor, refresh, refresh & is_indefinite(d)
