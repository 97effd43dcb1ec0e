r"""Eigenbases that follow their statistic by rotations: `method="tracked"`.

The statistic of a side is kept in its basis, $H = U^\top L U$ (`linalg/_tracking.py`). It averages
the Gram matrix of $X = U_L^\top G U_R$, which is $U_L^\top G G^\top U_L$, because the other basis
cancels. With statistics of whitened gradients, the eigenvalues $\mu$ of the other side first divide
the columns of $X$.

A refresh turns the moments and $X$ with the basis. Where a storage rounds the basis, this turn is
the product of the stored bases, made orthonormal; a rotation that is smaller than a gap between
their codes stays in $H$ until it has grown. The first refresh decomposes $H$.

*Storage.* $H$ is nearly diagonal, and its diagonal spans many orders of magnitude. A storage that
rounds gets $H_{ij} / \sqrt{H_{ii} H_{jj}}$, and the diagonal stays beside it. So near the identity
`packed` needs no Cholesky factor.

*Damage.* A basis that is not finite, or far from orthonormal, starts anew at the identity with its
statistic; `restarted` counts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._side import Side
from ..directions._carry import Moments
from ..linalg import _tracking
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals
from ..linalg._products import exact_product
from ..refresh._policy import Check, RootDamping, Verdict, verdict_of
from ._basis import Bases, Basis, BasisRule, turned
from ._methods import Tracked
from ._statistic import StatisticRule, identity


class GradedFactor(NamedTuple):
    """A statistic in its basis, in a storage that rounds."""

    correlation: Any  # H with a unit diagonal, (..., d, d) in stored form
    roots: jax.Array  # of the diagonal, (..., d)


class InBasis(NamedTuple):
    """A statistic in its basis, and this basis, of a single matrix."""

    statistic: Any  # H, (d, d) in stored form
    basis: Any  # U, (d, d) in stored form


class Refreshed(NamedTuple):
    """An `InBasis` after a refresh."""

    stored: InBasis
    basis: jax.Array  # U, (d, d), as it is stored
    rotated: jax.Array  # H, (d, d)
    turn: jax.Array  # the factor of U, (d, d)
    verdict: Verdict  # the policy's
    changed: jax.Array  # bool: whether it was multiplied by anything
    sound: jax.Array  # bool: whether it was finite and orthonormal; otherwise it started anew


class InBasisRule(StatisticRule):
    """How statistics are kept in their bases, and these bases follow them."""

    initial: Any  # the statistic starts as initial · I

    def encoded(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of `H (..., d, d)`."""
        order = x.shape[-1]
        if self.storage.exact(order):
            return super().encoded(x, previous)
        roots = jnp.sqrt(jnp.maximum(diagonals(x), 0))
        across = roots[..., :, None] * roots[..., None, :]
        live = across > 0
        eye = jnp.broadcast_to(identity(order, x.dtype), x.shape)
        correlation = jnp.where(live, x / jnp.where(live, across, 1), eye)
        last = None if previous is None else previous.correlation
        return GradedFactor(self.storage.encode_correlation(correlation, last), roots)

    def decoded(self, stored: Any) -> jax.Array:
        """`H` of a stored form."""
        if not isinstance(stored, GradedFactor):
            return super().decoded(stored)
        roots = stored.roots
        correlation = self.storage.decode_correlation(stored.correlation, roots.shape[-1])
        return correlation * roots[..., :, None] * roots[..., None, :]

    def started(self, old: InBasis) -> tuple[InBasis, jax.Array]:
        """The eigenvectors of a first statistic as its basis, and the turn to it."""
        h = self.decoded(old.statistic)
        q, d = _tracking.decomposed(h)
        good = jnp.isfinite(magnitude(q)) & jnp.isfinite(magnitude(d))
        coded = self.storage.encode_basis(q, old.basis)
        used = _tracking.orthonormalized(self.storage.decode_basis(coded))
        h = jnp.diag(d) if self.storage.exact(len(h)) else _in_turned_basis(h, used)
        new = InBasis(self.encoded(h, old.statistic), coded)
        turn = jnp.where(good, used, identity(len(h), h.dtype))
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old), turn

    def followed(
        self, old: InBasis, most: int, owner: Any, damping: RootDamping | None = None
    ) -> Refreshed:
        """Rotates a basis towards the eigenvectors of its statistic, if the policy asks for it.

        Args:
          old: the basis and its statistic; damaged ones start anew.
          most: the most rotations.
          owner: the `Basis` or `Factor` with the numbers that the policy examines.
          damping: of a root.
        """
        h, basis = self.decoded(old.statistic), self.storage.decode_basis(old.basis)
        eye = identity(len(h), h.dtype)
        sound = jnp.isfinite(magnitude(h)) & _tracking.orthonormal(basis)

        def follow() -> tuple[InBasis, jax.Array, jax.Array, jax.Array]:
            new, rotated, turn = _tracking.followed(basis, h, most)
            coded = self.storage.encode_basis(new, old.basis)
            used = self.storage.decode_basis(coded)
            if not self.storage.exact(len(h)):
                turn = _tracking.orthonormalized(exact_product(basis, used, transpose_a=True))
                rotated = _in_turned_basis(h, turn)
            return InBasis(self.encoded(rotated, old.statistic), coded), used, rotated, turn

        def keep() -> tuple[InBasis, jax.Array, jax.Array, jax.Array]:
            return old, basis, h, eye

        verdict = Verdict(jnp.bool_(True))
        if self.policy.examines is not None:
            # Eigenvalues of 0 are those of a basis that no refresh has turned.
            sizes = [magnitude(owner.eigenvalues)] + ([] if damping is None else [damping.damping])
            first = ~(jnp.isfinite(jnp.stack(sizes)).all() & (sizes[0] > 0))
            check = Check(jnp.where(sound, h, 0), None, owner.eigenvalues, first, damping)
            verdict = verdict_of(self.policy, check, owner.proxy)
        wanted = sound & verdict.refresh
        always = self.policy.examines is None
        found, used, rotated, turn = follow() if always else jax.lax.cond(wanted, follow, keep)
        changed = wanted & jnp.isfinite(magnitude(rotated)) & jnp.isfinite(magnitude(used))
        turn = jnp.where(changed, turn, eye)
        found = jax.tree.map(lambda a, b: jnp.where(changed, a, b), found, old)
        anew = InBasis(self.encoded(self.initial * eye, None), self.storage.encode_basis(eye, None))
        found = jax.tree.map(lambda a, b: jnp.where(sound, a, b), found, anew)
        return Refreshed(found, used, rotated, turn, verdict, changed, sound)


@dataclasses.dataclass(frozen=True)
class TrackedRule(InBasisRule, BasisRule):
    """The settings shared by all tracked bases."""

    follows = True

    def turned_sides(
        self, seen: jax.Array, bases: Sequence[Any], count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`U_Lᵀ G U_R` for each of them: an eigenbasis cancels in its Gram matrix."""
        del bases, count
        return seen, seen, seen

    def visits(self, never: jax.Array) -> list[tuple[Callable[..., Any], jax.Array | None]]:
        """The first refresh decomposes."""
        return [(self.start_one, never), *super().visits(never)]

    def refreshed(
        self, g: jax.Array, seen: jax.Array, bases: Bases, moments: Moments, count: jax.Array
    ) -> tuple[Bases, Moments, jax.Array]:
        """As without tracking; the gradient turns with the bases, as moments do."""
        moments = moments._replace(first=[*moments.first, seen])
        bases, moments, _ = super().refreshed(g, seen, bases, moments, count)
        *first, wide = moments.first
        return bases, moments._replace(first=first), wide

    def start_one(
        self, entry: tuple[Basis, Moments], given: Any, side: Side
    ) -> tuple[Basis, Moments]:
        """The eigenvectors of the first statistic as a single matrix's basis."""
        del given
        basis, moments = entry
        (statistic, stored), turn = self.started(InBasis(basis.statistic, basis.basis))
        return basis._replace(statistic=statistic, basis=stored), turned(moments, turn, side)

    def refresh_one(
        self, entry: tuple[Basis, Moments], given: None, side: Side
    ) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        del given
        basis, moments = entry
        assert isinstance(self.method, Tracked)
        old = InBasis(basis.statistic, basis.basis)
        found = self.followed(old, self.method.rotations, basis)
        d, changed = jnp.diagonal(found.rotated), found.changed
        eigenvalues = basis.eigenvalues
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, d, jnp.where(found.sound, eigenvalues, 0))
        spectrum = basis.spectrum
        if spectrum is not None:
            spectrum = jnp.where(changed, jnp.maximum(d, 0), spectrum)
        basis = basis._replace(
            statistic=found.stored.statistic,
            basis=found.stored.basis,
            spectrum=spectrum,
            eigenvalues=eigenvalues,
            proxy=found.verdict.proxy,
            counts=basis.counts.plus(
                checks=1,
                refreshes=changed,
                rejected=found.verdict.refresh & ~changed,
                restarted=~found.sound,
            ),
        )
        return basis, turned(moments, found.turn, side)


def _in_turned_basis(h: jax.Array, turn: jax.Array) -> jax.Array:
    """`turnᵀ h turn`, symmetric."""
    h = exact_product(turn, exact_product(h, turn), transpose_a=True)
    return (h + h.mT) / 2
