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
import numpy as np

from .._counts import counter, counters
from .._recording import Meaning, record
from .._side import LEFT, Side
from .._validate import check_positive_int
from ..directions._carry import Moments
from ..linalg._eigh import eigenbasis, rayleigh, refined_basis
from ..linalg._loops import in_turn
from ..linalg._numerics import magnitude
from ..linalg._products import exact_product
from ..refresh._due import refresh_due
from ..refresh._policy import Check, RefreshPolicy, verdict_of
from ..storage._storage import StorageRecord
from ._statistic import StatisticRule, each_of, identity
from ._whitened import (
    starting_multiple,
    whitened_by_eigenvalues,
)


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


class BasisMethod:
    """The type of `method=` of `in_eigenbasis`."""


@dataclasses.dataclass(frozen=True)
class Eigh(BasisMethod):
    """See `eigh`."""


@dataclasses.dataclass(frozen=True)
class Qr(BasisMethod):
    """See `qr`."""

    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Tracked(BasisMethod):
    """See `tracked`."""

    rotations: int = 16


def eigh() -> Eigh:
    """Decomposes the statistic at each refresh."""
    return Eigh()


def qr(steps: int = 1) -> Qr:
    """Decomposes the statistic at the first refresh, then iterates from the last basis.

    Args:
      steps: the most steps of orthogonal iteration in a refresh. After each step the policy is
        asked again, and the refresh ends when it asks for none, as in the QR algorithm from a warm
        start (Eschenhagen et al., arXiv:2506.03595). More than one step needs a policy that
        examines the bases, such as `policies.diagonal_residual`; `every` takes one.

    Raises:
      ValueError: if `steps` is not a positive integer.
    """
    check_positive_int("steps", steps)
    return Qr(steps)


def tracked(rotations: int = 16) -> Tracked:
    r"""Follows the statistic by products: rotates the basis a little at each refresh.

    The state has the statistic in the basis, $H = U^\top L U$, in place of $L$: it averages the
    Gram matrix of the rotated gradient. The first refresh decomposes it; each later one rotates
    $U$, $H$ and the moments by as many rotations as the change asks for, of four to six products
    of the factor's order each (`linalg/_tracking.py` has the formulas): one or two where the basis
    is refreshed at every step, two to four at every tenth. There is no QR decomposition, columns
    keep their eigenvalues, and nothing is sorted. So it takes a refresh at every step on hardware
    that is made for products: GPUs and TPUs. On CPUs a decomposition costs as much as 14 products.

    Args:
      rotations: the most rotations in a refresh. The first refreshes, of an average that is half
        new, take 5 to 16.

    Raises:
      ValueError: if `rotations` is not a positive integer.
    """
    check_positive_int("rotations", rotations)
    return Tracked(rotations)


METHODS = {"eigh": Eigh(), "qr": Qr(), "tracked": Tracked()}
"""The plain methods, by name."""


@dataclasses.dataclass(frozen=True)
class BasisRule(StatisticRule):
    """The settings shared by all bases."""

    policy: RefreshPolicy
    method: BasisMethod
    initial: Any  # the statistic starts as initial · I
    whiten: bool

    @property
    def examines(self) -> bool:
        """Whether the policy examines each basis that is due."""
        return self.policy.examines is not None

    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None = None
    ) -> Basis:
        """The initial bases of a batch: identities."""
        eye = identity(order, dtype)
        record(StorageRecord(order, self.storage.describe(order)))
        record(Meaning(f"order {order}: {self.storage.describe(order)}"))
        record(Meaning(f"refresh policy: {type(self.policy).__name__}"))
        return Basis(
            statistic=each_of(batch, self.encoded(self.initial * eye, None)),
            basis=each_of(batch, self.storage.encode_basis(eye, None)),
            eigenvalues=jnp.zeros((*batch, order), dtype) if self.examines else None,
            spectrum=jnp.full((*batch, order), self.initial, dtype) if self.whiten else None,
            proxy=jnp.zeros(batch, jnp.float32) if self.examines else None,
            counts=BasisCounts.zeros(batch),
            phase=phase,
        )

    def seen(
        self, g: jax.Array, bases: tuple[Basis | None, Basis | None], count: jax.Array
    ) -> jax.Array:
        """The gradient as the statistics see it."""
        del bases, count
        return g

    def entered(self, x: jax.Array, opened: Sequence[Any]) -> jax.Array:
        """What `_directed` is given, in the bases."""
        return self.rotated(x, opened)

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
        self,
        g: jax.Array,
        seen: jax.Array,
        left: Basis | None,
        right: Basis | None,
        count: jax.Array,
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Basis | None, Basis | None]:
        """What the statistics average of `g`, where they start, and bases with new eigenvalues."""
        dtype = np.promote_types(g.dtype, np.float32)
        bases = (left, right)
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

        old = (current(left), current(right))
        stored = [None if basis is None else basis.basis for basis in bases]
        rows, columns, both = self.turned_sides(seen.astype(dtype), stored, count)
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

    def refresh_one(
        self, entry: tuple[Basis, Moments], given: None, side: Side
    ) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        del given
        basis, moments = entry
        statistic = self.decoded(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound = jnp.isfinite(magnitude(statistic))
        never_refreshed = basis.refreshes == 0
        refresh, proxy, eigenvalues = jnp.bool_(True), basis.proxy, basis.eigenvalues
        if eigenvalues is not None:
            anew = never_refreshed | ~jnp.isfinite(eigenvalues).all()
            check = Check(statistic, old, eigenvalues, anew)
            refresh, proxy, *_ = verdict_of(self.policy, check, proxy)

        in_order = jnp.arange(len(old))

        def renewed() -> tuple[Any, jax.Array, jax.Array]:
            if not isinstance(self.method, Qr):
                new, order = eigenbasis(statistic), in_order
            else:
                new, order = jax.lax.cond(
                    never_refreshed,
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
        moments = jax.lax.cond(
            changed,
            lambda: _turned(moments, exact_product(used.mT, old).astype(old.dtype), order, side),
            lambda: moments,
        )
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, rayleigh(statistic, used), eigenvalues)
        spectrum = basis.spectrum
        if spectrum is not None:
            reordered = spectrum[order]
            # The averages so far are those of the identity as a basis.
            carried = jax.lax.cond(
                never_refreshed, lambda: rayleigh(statistic, used), lambda: reordered
            )
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

    def refreshed(
        self, side: Side, g: jax.Array, basis: Basis | None, moments: Moments, count: jax.Array
    ) -> tuple[Basis | None, Moments]:
        """One side's bases after the refreshes due at this step, and the moments carried along."""
        if basis is None:
            return None, moments
        alone = self.examines or isinstance(self.method, Qr)
        alone = alone or self.decodes_singly(side.order(g))
        found, moments = refresh_due(
            jax.jit(functools.partial(self.refresh_one, side=side)),
            (basis._replace(phase=None), moments),
            g.shape[:-2],
            self.policy.schedule,
            count,
            phase=basis.phase,
            numbers=None if alone else max(g.shape[-2:]) ** 2,
        )
        return found._replace(phase=basis.phase), moments


def _turned(moments: Moments, turn: jax.Array, order: jax.Array, side: Side) -> Moments:
    """Moments in a new basis: the first are turned to it, the second are put in its order."""
    first, second = moments
    if side is LEFT:
        moved = [_exact(turn, m).astype(m.dtype) for m in first]
        return Moments(moved, [v[order] for v in second])
    moved = [_exact(m, turn.mT).astype(m.dtype) for m in first]
    return Moments(moved, [v[:, order] for v in second])


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = jnp.result_type(a, b)
    return exact_product(a.astype(dtype), b.astype(dtype))
