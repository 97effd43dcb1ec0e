r"""Eigenbases that follow their statistic by rotations: `method="tracked"`, `solver="tracked"`.

The statistic of a side is kept in its basis, $H = U^\top L U$ (`linalg/_tracking.py`). It averages
the Gram matrix of $X = U_L^\top G U_R$, which is $U_L^\top G G^\top U_L$, because the other basis
cancels; for roots that of $U_L^\top S$ or $S U_R$. With statistics of whitened gradients, the
eigenvalues $\mu$ of the other side first divide the columns of $X$.

A refresh rotates $U$ and $H$ by products, and turns the moments and $X$ with the basis. Where a
storage rounds the basis, this turn is the product of the stored bases, made orthonormal; a rotation
that is smaller than a gap between their codes stays in $H$ until it has grown. The first refresh
decomposes $H$.

*Roots* are made of the basis and $h = \mathrm{diag}(H)$:

$$L^{-1/p} \approx U\, \mathrm{diag}(r(h))\, U^\top$$

with the damping modes, the range and the rounding floor of `linalg/_inverse_root.py`. Rotations end
when one was short, so that the rest off the diagonal of $H$ is of second order, and the error of
the root's eigenvalues is of second order in that. The state shows this rest: `error` is $\|H -
\mathrm{diag}(h)\|_F / \|H\|_F$, as for an eigendecomposition. A policy that examines factors gets
$H$; where it asks for no refresh, $U$ and $H$ stay, and its verdict has the root's eigenvalues and
damping.

*Storage.* $H$ is nearly diagonal, and its diagonal spans many orders of magnitude. A storage that
rounds gets $H_{ij} / \sqrt{H_{ii} H_{jj}}$, and the diagonal stays beside it. So near the identity
`packed` needs no Cholesky factor.

*Damage.* A basis that is not finite, or far from orthonormal, starts anew at the identity with its
statistic; `restarted` counts it.

*Cost* for order `d`: 5 products, `10 d³` FLOPs, for a refresh by one short rotation. A root takes
`2d²k` per update of the statistic beside `k` columns more than for $L$ itself, and the memory of a
root more.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._side import Side
from ..directions._carry import Moments
from ..linalg import _tracking
from ..linalg._eigh import from_eigen
from ..linalg._inverse_root import root_eigenvalues, rounding_floor
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals
from ..linalg._products import at, exact_product
from ..refresh._policy import Check, RootDamping, Verdict, verdict_of
from ..storage._storage import Storage
from ._basis import Basis, BasisRule, turned_moments
from ._factor import Factor, FactorRule
from ._statistic import Pair, SideRule, identity


class GradedFactor(NamedTuple):
    """A statistic in its basis, in a storage that rounds."""

    correlation: Any  # H with a unit diagonal, (..., d, d) in stored form
    roots: jax.Array  # of the diagonal, (..., d)


@dataclasses.dataclass(frozen=True)
class Graded:
    """What encodes and decodes statistics in their bases."""

    storage: Storage

    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of `H (..., d, d)`."""
        order = x.shape[-1]
        if self.storage.exact(order):
            return self.storage.encode_factor(x, previous)
        roots = jnp.sqrt(jnp.maximum(diagonals(x), 0))
        across = roots[..., :, None] * roots[..., None, :]
        live = across > 0
        eye = jnp.broadcast_to(identity(order, x.dtype), x.shape)
        correlation = jnp.where(live, x / jnp.where(live, across, 1), eye)
        last = None if previous is None else previous.correlation
        return GradedFactor(self.storage.encode_correlation(correlation, last), roots)

    def decode_factor(self, stored: Any) -> jax.Array:
        """`H` of a stored form."""
        if not isinstance(stored, GradedFactor):
            return self.storage.decode_factor(stored)
        roots = stored.roots
        correlation = self.storage.decode_correlation(stored.correlation, roots.shape[-1])
        return correlation * roots[..., :, None] * roots[..., None, :]


class Refreshed(NamedTuple):
    """A single matrix's basis after a refresh, as it is stored."""

    basis: jax.Array  # U (d, d)
    statistic: jax.Array  # H (d, d)
    verdict: Verdict  # the policy's
    changed: jax.Array  # bool: whether the basis was multiplied by anything
    sound: jax.Array  # bool: whether it was finite and orthonormal; otherwise it started anew


class InBasisRule(SideRule):
    """How statistics are kept in their bases, and these bases follow them."""

    in_bases = True
    basis_field: str  # of a `Factor` or `Basis`

    @abc.abstractmethod
    def renewed(self, owner: Any, new: Refreshed) -> Any:
        """The `Factor` or `Basis` of a single matrix after a refresh."""

    def damping_of(self, owner: Any) -> RootDamping | None:
        """What a policy sees of the damping of a root."""
        del owner

    def visits(self) -> list[tuple[Callable[..., Any], bool | None]]:
        """The first refresh decomposes."""
        return [(self.start_one, True), *super().visits()]

    def start_one(
        self, entry: tuple[Any, Moments], given: None, side: Side | None
    ) -> tuple[Any, Moments]:
        """Gives a single matrix the eigenvectors of its first statistic as a basis."""
        del given
        owner, moments = entry
        old = owner.statistic, getattr(owner, self.basis_field)
        h = self.statistics.decode_factor(owner.statistic)
        q, d = _tracking.decomposed(h)
        good = jnp.isfinite(magnitude(q)) & jnp.isfinite(magnitude(d))
        coded = self.storage.encode_basis(q, old[1])
        used = _tracking.orthonormalized(self.storage.decode_basis(coded))
        h = jnp.diag(d) if self.storage.exact(len(h)) else _in_turned_basis(h, used)
        new = self.statistics.encode_factor(h, owner.statistic), coded
        turn = jnp.where(good, used, identity(len(h), h.dtype))
        statistic, basis = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        owner = owner._replace(statistic=statistic, **{self.basis_field: basis})
        return owner, turned_moments(moments, turn, side)

    def refresh_one(
        self, entry: tuple[Any, Moments], given: None, side: Side | None
    ) -> tuple[Any, Moments]:
        """Rotates the basis of a single matrix, if the policy asks for it; starts damage anew."""
        del given
        owner, moments = entry
        old = owner.statistic, getattr(owner, self.basis_field)
        h, basis = self.statistics.decode_factor(old[0]), self.storage.decode_basis(old[1])
        eye = identity(len(h), h.dtype)
        sound = jnp.isfinite(magnitude(h)) & _tracking.orthonormal(basis)

        def follow() -> tuple[Any, jax.Array, jax.Array, jax.Array]:
            new, rotated, turn = _tracking.followed(basis, h, self.method.rotations)
            coded = self.storage.encode_basis(new, old[1])
            used = self.storage.decode_basis(coded)
            if not self.storage.exact(len(h)):
                turn = _tracking.orthonormalized(exact_product(basis, used, transpose_a=True))
                rotated = _in_turned_basis(h, turn)
            statistic = self.statistics.encode_factor(rotated, old[0])
            return (statistic, coded), used, rotated, turn

        def keep() -> tuple[Any, jax.Array, jax.Array, jax.Array]:
            return old, basis, h, eye

        verdict = Verdict(jnp.bool_(True))
        examined = self.policy.examines is not None
        if examined:
            damping = self.damping_of(owner)
            # Eigenvalues of 0 are those of a basis that no refresh has turned.
            sizes = [magnitude(owner.eigenvalues)] + ([] if damping is None else [damping.damping])
            first = ~(jnp.isfinite(jnp.stack(sizes)).all() & (sizes[0] > 0))
            check = Check(jnp.where(sound, h, 0), None, owner.eigenvalues, first, damping)
            verdict = verdict_of(self.policy, check, owner.proxy)
        wanted = sound & verdict.refresh
        found, used, rotated, turn = jax.lax.cond(wanted, follow, keep) if examined else follow()
        changed = wanted & jnp.isfinite(magnitude(rotated)) & jnp.isfinite(magnitude(used))
        turn = jnp.where(changed, turn, eye)
        found = jax.tree.map(lambda a, b: jnp.where(changed, a, b), found, old)
        anew = self.statistics.encode_factor(self.initial * eye, None)
        anew = anew, self.storage.encode_basis(eye, None)
        statistic, stored = jax.tree.map(lambda a, b: jnp.where(sound, a, b), found, anew)
        owner = self.renewed(owner, Refreshed(used, rotated, verdict, changed, sound))
        owner = owner._replace(statistic=statistic, **{self.basis_field: stored})
        return owner, turned_moments(moments, turn, side)


@dataclasses.dataclass(frozen=True)
class TrackedRule(InBasisRule, BasisRule):
    """The settings of tracked bases."""

    basis_field = "basis"

    def renewed(self, owner: Basis, new: Refreshed) -> Basis:
        """Eigenvalues are the diagonal of the statistic."""
        _, h, verdict, changed, sound = new
        d, eigenvalues, spectrum = jnp.diagonal(h), owner.eigenvalues, owner.spectrum
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, d, jnp.where(sound, eigenvalues, 0))
        if spectrum is not None:
            spectrum = jnp.where(changed, jnp.maximum(d, 0), spectrum)
        counts = owner.counts.plus(
            checks=1, refreshes=changed, rejected=verdict.refresh & ~changed, restarted=~sound
        )
        return owner._replace(
            spectrum=spectrum, eigenvalues=eigenvalues, proxy=verdict.proxy, counts=counts
        )


@dataclasses.dataclass(frozen=True)
class TrackedFactorRule(InBasisRule, FactorRule):
    """The settings of factors whose bases are tracked."""

    basis_field = "eigenvectors"

    def accumulated(
        self, owners: Pair, sources: Sequence[jax.Array], count: jax.Array, start: Any = None
    ) -> Pair:
        """Sources enter the bases first: `Uᵀ s`, or `s U` on the right."""

        def entered(basis: jax.Array, x: jax.Array, side: Side) -> jax.Array:
            opened = self.storage.open_basis(basis, side.other.order(x))
            with jax.default_matmul_precision("highest"), at(self.products.step):
                return self.storage.rotate(opened, x, side, back=False)

        found = [*sources]
        for i, (side, factor) in enumerate(zip(Side, owners, strict=True)):
            if factor is not None:
                wide = sources[i].astype(np.promote_types(sources[i].dtype, np.float32))
                stored = [factor.eigenvectors if own is side else None for own in Side]
                found[i] = self.two_sided(entered, wide, stored, count)
        return super().accumulated(owners, found, count, start)

    def damping_of(self, owner: Factor) -> RootDamping | None:
        """What a policy sees of the damping of a root."""
        assert owner.damping is not None
        return RootDamping(owner.damping, self.eps, self.root)

    def renewed(self, owner: Factor, new: Refreshed) -> Factor:
        """The root comes from the basis and the diagonal of the statistic."""
        u, h, verdict, changed, sound = new
        d, damping, last = jnp.diagonal(h), self.eps, owner.damping
        if last is not None:
            assert verdict.eigenvalues is not None and verdict.damping is not None
            d = jnp.where(changed, d, verdict.eigenvalues)
            damping = verdict.damping.astype(last.dtype)
        floor = rounding_floor(h, self.root, self.sides)
        x = from_eigen(u, root_eigenvalues(d, self.root, damping, self.damping_mode, floor))
        norm, off = jnp.linalg.norm(h), jnp.linalg.norm(h - jnp.diag(jnp.diagonal(h)))
        # All-zero statistics produce no root: it would consist of damping alone.
        good = (magnitude(h) > 0) & sound & jnp.isfinite(magnitude(x))
        good &= changed | ~verdict.refresh
        found = owner._replace(
            inverse_root=self.storage.encode_root(x),
            error=jnp.where(norm > 0, off / jnp.where(norm > 0, norm, 1), 0).astype(jnp.float32),
            eigenvalues=None if last is None else d,
            damping=None if last is None else damping,
        )
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), found, owner)
        counts = owner.counts.plus(
            checks=1, refreshes=verdict.refresh & good, rejected=~good, restarted=~sound
        )
        return kept._replace(
            eigenvalues=jax.tree.map(lambda d: jnp.where(sound, d, 0), kept.eigenvalues),
            proxy=verdict.proxy,
            counts=counts,
        )


def _in_turned_basis(h: jax.Array, turn: jax.Array) -> jax.Array:
    """`turnᵀ h turn`, symmetric."""
    h = exact_product(turn, exact_product(h, turn), transpose_a=True)
    return (h + h.mT) / 2
