r"""One Kronecker factor: its statistic, its inverse root, and the refresh of the root.

`refresh_one` works on a single factor `(d, d)`; the callers loop over batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._counts import counter, counters
from .._side import LEFT, RIGHT, Side
from ..linalg._eigh import eigh, from_eigen, is_indefinite
from ..linalg._inverse_root import root_eigenvalues, rounding_floor, solve_root
from ..linalg._numerics import HIGHEST, magnitude
from ..linalg._products import at, multiplied
from ..refresh._due import Refreshing, refresh_due, untried
from ..refresh._policy import Check, RootDamping, verdict_of
from ..storage._storage import dense
from ._noise import eigenvalue_floor
from ._statistic import StatisticRule, each_of, identity
from ._whitened import starting_multiple, whitened_by_roots


@counters
class FactorCounts(NamedTuple):
    """The counters of a `Factor`."""

    value: Any
    names = ("checks", "refreshes", "indefinite", "rejected", "restarted")


class Factor(NamedTuple):
    """The preconditioners of one side of a batch of matrices; their order `d` is `m` or `n`."""

    statistic: Any  # L or R, (..., d, d) in stored form
    inverse_root: Any  # in use, (..., d, d) in stored form
    eigenvectors: Any  # Q of the last refresh, (..., d, d), if the policy examines it or it follows
    eigenvalues: jax.Array | None  # their undamped eigenvalues, (..., d)
    damping: jax.Array | None  # ε in use, (...), if the policy examines anything
    proxy: jax.Array | None  # its last figure, such as FOAM's h, float32 (...)
    error: jax.Array | None  # otherwise: the solver's error estimate, float32 (...)
    counts: FactorCounts
    phase: jax.Array | None = None  # when it is due, int32 (...), if staggered

    checks = counter("checks")  # times the factor was due, int32 (...)
    refreshes = counter("refreshes")  # inverse roots recomputed
    indefinite = counter("indefinite")  # refreshes whose statistic had a negative eigenvalue
    rejected = counter("rejected")  # checks with a zero or non-finite statistic or root
    restarted = counter("restarted")  # checks whose statistic was not finite and started anew


Factors = tuple[Factor | None, Factor | None]
"""The factors of the left and of the right side."""


def of_sides(one: Callable[[Side, Factor], Factor], factors: Factors) -> Factors:
    """`one` of the factor of each side that has one."""
    left, right = factors
    return (
        None if left is None else one(LEFT, left),
        None if right is None else one(RIGHT, right),
    )


@dataclasses.dataclass(frozen=True)
class FactorRule(StatisticRule):
    """The settings shared by all factors of a preconditioner."""

    root: int
    eps: Any
    damping_mode: str
    solver: Any  # a name, or `eigenbases.tracked()`
    initial: Any  # the statistic starts as initial · I
    sides: int = 1  # how many roots a matrix is multiplied by

    @property
    def has_exact_eigenpairs(self) -> bool:
        """Whether directions may be computed from them, as from the roots."""
        kept = self.policy.examines is not None and self.solver == "eigh"
        return kept and self.sides == 2 and self.storage == dense()

    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None = None
    ) -> Factor:
        """The initial factors of a batch; their roots are identities."""
        eye = identity(order, dtype)
        keeps = self.policy.examines is not None
        return Factor(
            statistic=each_of(batch, self.storage.encode_factor(self.initial * eye, None)),
            inverse_root=each_of(batch, self.storage.encode_root(eye)),
            eigenvectors=each_of(batch, jnp.copy(eye)) if keeps else None,
            eigenvalues=jnp.zeros((*batch, order), dtype) if keeps else None,
            damping=jnp.full(batch, self.eps, dtype) if keeps else None,
            proxy=jnp.zeros(batch, jnp.float32) if keeps else None,
            error=None if keeps else jnp.zeros(batch, jnp.float32),
            counts=FactorCounts.zeros(batch),
            phase=phase,
        )

    def apply_root(
        self,
        stored: Any,
        x: jax.Array,
        side: Side,
        precision: jax.lax.PrecisionLike = None,
    ) -> jax.Array:
        """The product of a stored root with `x (..., m, n)`, on this side."""
        root = self.storage.decode_root(stored)
        x = x.astype(root.dtype)
        precision = self.products.step or precision
        return multiplied(*((root, x) if side is LEFT else (x, root)), precision)

    def whitened(
        self, g: jax.Array, factors: Factors, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """The matrices that the statistics of both sides average, and the start of statistics."""
        dtype = np.promote_types(g.dtype, np.float32)
        exact = functools.partial(self.apply_root, precision=HIGHEST)

        def multiply(x: jax.Array, side: Side) -> jax.Array:
            roots = [
                None if factor is None or own is not side else factor.inverse_root
                for factor, own in zip(factors, Side, strict=True)
            ]
            return self.two_sided(exact, x, roots, count)

        left, right = (None if factor is None else factor.refreshes > 0 for factor in factors)
        start = starting_multiple(g, self.sides, self.initial, dtype)
        return whitened_by_roots(g, multiply, (left, right), start), start

    def entered(self, s: jax.Array, factor: Factor, side: Side, count: jax.Array) -> jax.Array:
        """The matrices that a factor's statistic averages, for `s (..., m, n)`."""
        del factor, side, count
        return s

    def refreshing(self, side: Side, x: Any) -> Refreshing:
        """What it takes to refresh one factor."""
        order = side.order(x)
        # A policy that examines factors computes few: at once they would all be computed.
        alone = self.policy.examines is not None or self.storage.decodes_singly(order)
        return Refreshing(float(order) ** 3, None if alone else order**2)

    def visits(self) -> list[tuple[Callable[[Factor, None], Factor], bool]]:
        """What refreshes single factors, and whether only those never refreshed."""
        return [(self.refresh_one, False)]

    def refreshed(self, g: jax.Array, factors: Factors, count: jax.Array) -> Factors:
        """The factors of both sides after the refreshes due at this step, and of those untried.

        Nothing is due before step 1: steps are counted from the warm-up.
        """
        # Traced once for both sides of square matrices. A rule that holds tracers has no hash, and
        # so its methods have none; a partial function has.
        visits = [(jax.jit(functools.partial(visit)), first) for visit, first in self.visits()]

        def one(side: Side, factor: Factor) -> Factor:
            again, never = untried(factor).reshape(-1), factor.refreshes.reshape(-1) == 0
            found = factor._replace(phase=None)

            def chosen(first: bool, due: jax.Array) -> jax.Array:
                due = due & (count > 0) | again
                return due & never if first else due

            for visit, first in visits:
                found = refresh_due(
                    visit,
                    found,
                    g.shape[:-2],
                    self.policy.schedule,
                    count,
                    phase=factor.phase,
                    select=functools.partial(chosen, first),
                    numbers=self.refreshing(side, g).numbers,
                )
            return found._replace(phase=factor.phase)

        with at(self.products.refresh):
            return of_sides(one, factors)

    def refresh_one(self, factor: Factor, given: None) -> Factor:
        """Checks a single factor, follows the policy's verdict and counts it."""
        del given
        statistic = self.storage.decode_factor(factor.statistic)
        floor: Any = rounding_floor(statistic, self.root, self.sides)
        if self.has_exact_eigenpairs:
            floor = eigenvalue_floor(statistic.dtype)
        size = magnitude(statistic)
        sound = jnp.isfinite(size)
        eye = identity(len(statistic), statistic.dtype)
        first = jnp.zeros_like(statistic) + self.initial * eye  # on the mesh of the statistic

        def solved() -> tuple[Factor, jax.Array, jax.Array, jax.Array]:
            if self.policy.examines is not None:
                x, new, refresh, indefinite = self._examined(factor, statistic, floor)
            else:
                found = solve_root(
                    statistic, self.root, self.eps, self.damping_mode, self.solver, floor
                )
                new = factor._replace(error=found.error.astype(jnp.float32))
                x, refresh, indefinite = found.inverse_root, jnp.bool_(True), found.indefinite
            good = jnp.isfinite(magnitude(x)) & sound
            new = new._replace(inverse_root=self.storage.encode_root(x))
            return new, good, refresh, indefinite

        def nothing() -> tuple[Factor, jax.Array, jax.Array, jax.Array]:
            return factor, jnp.bool_(False), jnp.bool_(False), jnp.bool_(False)

        # All-zero statistics produce no root: it would consist of damping alone.
        live = size > 0
        new, good, refresh, indefinite = jax.lax.cond(live, solved, nothing)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, factor)
        return kept._replace(
            statistic=self.kept_statistic(sound, factor.statistic, first),
            proxy=jax.tree.map(lambda a, b: jnp.where(sound, a, b), new.proxy, factor.proxy),
            counts=factor.counts.plus(
                checks=1,
                refreshes=refresh & good,
                indefinite=indefinite & good,
                rejected=~good,
                restarted=~sound,
            ),
        )

    def _examined(
        self, factor: Factor, statistic: jax.Array, floor: jax.typing.ArrayLike
    ) -> tuple[jax.Array, Factor, jax.Array, jax.Array]:
        assert factor.eigenvectors is not None and factor.eigenvalues is not None
        assert factor.damping is not None
        damping = factor.damping.astype(statistic.dtype)
        last = (factor.eigenvectors, factor.eigenvalues, factor.damping)
        damaged = ~jnp.isfinite(jnp.stack([magnitude(x) for x in last])).all()
        check = Check(
            statistic,
            factor.eigenvectors,
            factor.eigenvalues,
            first=(factor.refreshes == 0) | damaged,
            root_damping=RootDamping(damping, self.eps, self.root),
        )
        refresh, proxy, damping, kept = verdict_of(self.policy, check, factor.proxy)
        q, d = jax.lax.cond(refresh, eigh, lambda _: (check.eigenvectors, kept), statistic)
        assert damping is not None
        x = from_eigen(q, root_eigenvalues(d, self.root, damping, floor=floor))
        new = factor._replace(
            eigenvectors=q,
            eigenvalues=d,
            damping=damping.astype(factor.damping.dtype),
            proxy=proxy,
        )
        return x, new, refresh, refresh & is_indefinite(d)
