r"""Eigenbases that follow their statistic by rotations: `method="tracked"`.

The statistic of a side is kept in its basis, $H = U^\top L U$ (`linalg/_tracking.py`). It averages
the Gram matrix of $X = U_L^\top G U_R$, which is $U_L^\top G G^\top U_L$, because the other basis
cancels. With statistics of whitened gradients, eigenvalues $\mu$ of the other side divide the
columns of $X$ before.

A refresh turns the moments and $X$ by what it turns the basis by. Where a storage rounds the basis,
this is what the stored bases say, made orthonormal; a rotation that is smaller than a gap between
their codes stays in $H$ until it has grown. The first refresh decomposes $H$.

*Storage.* $H$ is nearly diagonal, and its diagonal spans many orders of magnitude. A storage that
rounds gets $H_{ij} / \sqrt{H_{ii} H_{jj}}$, and the diagonal stays beside it.
*Damage.* A basis that is not finite, or far from orthonormal, starts anew at the identity with its
statistic; `restarted` counts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._side import LEFT, Side
from .._trees import widened
from ..directions._carry import Moments
from ..linalg import _tracking
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals
from ..linalg._products import exact_product
from ..refresh._due import refresh_due
from ..refresh._policy import Check, verdict_of
from ._basis import Basis, BasisRule
from ._basis import Tracked as Method
from ._statistic import identity


class GradedFactor(NamedTuple):
    """A statistic in its basis, in a storage that rounds."""

    correlation: Any  # H with a unit diagonal, (..., d, d) in stored form
    roots: jax.Array  # of the diagonal, (..., d)


@dataclasses.dataclass(frozen=True)
class TrackedRule(BasisRule):
    """The settings shared by all tracked bases."""

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
        return GradedFactor(super().encoded(correlation, last), roots)

    def decoded(self, stored: Any) -> jax.Array:
        """`H` of a stored form."""
        if not isinstance(stored, GradedFactor):
            return super().decoded(stored)
        roots = stored.roots
        return super().decoded(stored.correlation) * roots[..., :, None] * roots[..., None, :]

    def seen(
        self, g: jax.Array, bases: tuple[Basis | None, Basis | None], count: jax.Array
    ) -> jax.Array:
        """The gradient in the bases in use."""

        def entered(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            return self.rotated(x, self.opened(x, stored))

        wide = widened(g)
        stored = [None if basis is None else basis.basis for basis in bases]
        return self.visited(entered, wide, wide, stored, count)

    def entered(self, x: jax.Array, opened: Sequence[Any]) -> jax.Array:
        """`x`, which is in the bases already."""
        del opened
        return x

    def turned_sides(
        self, seen: jax.Array, bases: Sequence[Any], count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`U_Lᵀ G U_R` for each of them: an eigenbasis cancels in its Gram matrix."""
        del bases, count
        return seen, seen, seen

    def refreshed(
        self, side: Side, g: jax.Array, basis: Basis | None, moments: Moments, count: jax.Array
    ) -> tuple[Basis | None, Moments]:
        """One side's bases after the refreshes due at this step, and the moments carried along."""
        if basis is None:
            return None, moments
        singly = self.decodes_singly(side.order(g))
        numbers = None if singly else max(g.shape[-2:]) ** 2
        due = functools.partial(
            refresh_due,
            batch=g.shape[:-2],
            schedule=self.policy.schedule,
            count=count,
            phase=basis.phase,
        )

        def never(entry: Any, given: Any, due: jax.Array) -> jax.Array:
            del given
            return due & (entry[0].refreshes.reshape(-1) == 0)

        entry = basis._replace(phase=None), moments
        start = jax.jit(functools.partial(self.start_one, side=side))
        entry = due(start, entry, select=never)
        follow = jax.jit(functools.partial(self.refresh_one, side=side))
        found, moments = due(follow, entry, numbers=None if self.examines else numbers)
        return found._replace(phase=basis.phase), moments

    def start_one(
        self, entry: tuple[Basis, Moments], given: Any, side: Side
    ) -> tuple[Basis, Moments]:
        """The eigenvectors of the first statistic as a single matrix's basis."""
        del given
        basis, moments = entry
        h = self.decoded(basis.statistic)
        q, d = _tracking.decomposed(h)
        good = jnp.isfinite(magnitude(q)) & jnp.isfinite(magnitude(d))
        coded = self.storage.encode_basis(q, basis.basis)
        used = _tracking.orthonormalized(self.storage.decode_basis(coded))
        h = jnp.diag(d) if self.storage.exact(len(h)) else _turned(h, used)
        new = self.encoded(h, basis.statistic), coded
        statistic, stored = jax.tree.map(
            lambda a, b: jnp.where(good, a, b), new, (basis.statistic, basis.basis)
        )
        turn = jnp.where(good, used, identity(len(h), h.dtype))
        return basis._replace(statistic=statistic, basis=stored), turned(moments, turn, side)

    def refresh_one(
        self, entry: tuple[Basis, Moments], given: None, side: Side
    ) -> tuple[Basis, Moments]:
        """Checks one side's basis of a single matrix; returns it and the matrix's moments."""
        del given
        basis, moments = entry
        h = self.decoded(basis.statistic)
        old = self.storage.decode_basis(basis.basis)
        sound = jnp.isfinite(magnitude(h)) & _tracking.orthonormal(old)
        refresh, proxy, eigenvalues = jnp.bool_(True), basis.proxy, basis.eigenvalues
        if eigenvalues is not None:
            first = (basis.refreshes == 0) | ~jnp.isfinite(eigenvalues).all()
            check = Check(h, None, eigenvalues, first)
            refresh, proxy, *_ = verdict_of(self.policy, check, proxy)
        assert isinstance(self.method, Method)
        most = self.method.rotations

        def follow() -> _tracking.Tracked:
            return _tracking.followed(old, h, most)

        def keep() -> _tracking.Tracked:
            return _tracking.Tracked(old, h, eye)

        eye = identity(len(h), h.dtype)
        wanted = refresh & sound
        new, rotated, turn = jax.lax.cond(wanted, follow, keep) if self.examines else follow()
        coded = self.storage.encode_basis(new, basis.basis)
        used = self.storage.decode_basis(coded)
        if not self.storage.exact(len(h)):
            turn = _tracking.orthonormalized(exact_product(old, used, transpose_a=True))
            rotated = _turned(h, turn)
        changed = wanted & jnp.isfinite(magnitude(rotated)) & jnp.isfinite(magnitude(used))
        turn = jnp.where(changed, turn, eye)
        d = jnp.diagonal(rotated)
        if eigenvalues is not None:
            eigenvalues = jnp.where(changed, d, eigenvalues)
        spectrum = basis.spectrum
        if spectrum is not None:
            spectrum = jnp.where(changed, jnp.maximum(d, 0), spectrum)
        kept = self.encoded(rotated, basis.statistic), coded
        kept = jax.tree.map(
            lambda a, b: jnp.where(changed, a, b), kept, (basis.statistic, basis.basis)
        )
        anew = (
            self.encoded(self.initial * eye, None),
            self.storage.encode_basis(eye, None),
        )
        statistic, stored = jax.tree.map(lambda a, b: jnp.where(sound, a, b), kept, anew)
        basis = basis._replace(
            statistic=statistic,
            basis=stored,
            spectrum=spectrum,
            eigenvalues=eigenvalues,
            proxy=proxy,
            counts=basis.counts.plus(
                checks=1, refreshes=changed, rejected=refresh & ~changed, restarted=~sound
            ),
        )
        return basis, turned(moments, turn, side)


def turned(moments: Moments, turn: jax.Array, side: Side) -> Moments:
    """Moments in a basis that was multiplied by `turn (d, d)`: first moments turn with it."""

    def moved(m: jax.Array) -> jax.Array:
        wide = m.astype(jnp.promote_types(m.dtype, turn.dtype))
        by = turn.astype(wide.dtype)
        found = (
            exact_product(by, wide, transpose_a=True) if side is LEFT else exact_product(wide, by)
        )
        return found.astype(m.dtype)

    return moments._replace(first=[moved(m) for m in moments.first])


def _turned(h: jax.Array, turn: jax.Array) -> jax.Array:
    """`turnᵀ h turn`, symmetric."""
    h = exact_product(turn, exact_product(h, turn), transpose_a=True)
    return (h + h.mT) / 2
