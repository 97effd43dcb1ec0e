r"""Inverse roots from eigenbases that follow their statistics: `solver="tracked"`.

The statistic of a side is kept in its basis, $H = U^\top L U$, as `_tracked.py` has it for bases:
it averages the Gram matrix of $U_L^\top S$ or $S U_R$. A refresh rotates $U$ and $H$ by products
(`linalg/_tracking.py`), and the root is

$$L^{-1/p} \approx U\, \mathrm{diag}(r(h))\, U^\top, \qquad h = \mathrm{diag}(H)$$

with the damping modes, the range and the rounding floor of `linalg/_inverse_root.py`. Rotations end
when one was short, so that the rest off the diagonal of $H$ is of second order, and the error of
the root's eigenvalues is of second order in that. The state shows this rest: `error` is $\|H -
\mathrm{diag}(h)\|_F / \|H\|_F$, as for an eigendecomposition. A policy that examines factors gets
$H$; where it asks for no refresh, $U$ and $H$ stay, and its verdict has the root's eigenvalues and
damping.

*Cost* for order `d`: 5 products, `10 d³` FLOPs, for a refresh by one short rotation; per update of
the statistic `2d²k` beside `k` columns more than for $L$ itself. *Memory*: as much as a root more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._side import Side
from ..linalg._eigh import from_eigen
from ..linalg._inverse_root import root_eigenvalues, rounding_floor
from ..linalg._numerics import magnitude
from ..linalg._products import at
from ..refresh._policy import RootDamping
from ._factor import Factor, FactorRule
from ._statistic import each_of, identity
from ._tracked import InBasis, InBasisRule


@dataclasses.dataclass(frozen=True)
class TrackedFactorRule(InBasisRule, FactorRule):
    """The settings shared by all factors whose bases are tracked."""

    def start(
        self, batch: tuple[int, ...], order: int, dtype: jax.typing.DTypeLike, phase=None
    ) -> Factor:
        """The initial factors of a batch; their bases and roots are identities."""
        eye = identity(order, dtype)
        return (
            super()
            .start(batch, order, dtype, phase)
            ._replace(
                statistic=each_of(batch, self.encoded(self.initial * eye, None)),
                eigenvectors=each_of(batch, self.storage.encode_basis(eye, None)),
                error=jnp.zeros(batch, jnp.float32),
            )
        )

    def entered(self, s: jax.Array, factor: Factor, side: Side, count: jax.Array) -> jax.Array:
        """`Uᵀ s`, or `s U` on the right."""
        stored = [factor.eigenvectors if own is side else None for own in Side]

        def turned(basis: jax.Array, x: jax.Array, side: Side) -> jax.Array:
            opened = self.storage.open_basis(basis, side.other.order(x))
            with jax.default_matmul_precision("highest"), at(self.products.step):
                return self.storage.rotate(opened, x, side, back=False)

        wide = s.astype(np.promote_types(s.dtype, np.float32))
        return self.two_sided(turned, wide, stored, count)

    def visits(self) -> list[tuple[Callable[[Factor, None], Factor], bool]]:
        """The first refresh decomposes."""
        return [(self.start_one, True), *super().visits()]

    def start_one(self, factor: Factor, given: None) -> Factor:
        """The eigenvectors of the first statistic as a single factor's basis."""
        del given
        (statistic, basis), _ = self.started(InBasis(factor.statistic, factor.eigenvectors))
        return factor._replace(statistic=statistic, eigenvectors=basis)

    def refresh_one(self, factor: Factor, given: None) -> Factor:
        """Follows a single factor's statistic, and computes its root."""
        del given
        old = InBasis(factor.statistic, factor.eigenvectors)
        last = factor.damping
        examined = None if last is None else RootDamping(last, self.eps, self.root)
        found = self.followed(old, self.solver.rotations, factor, examined)
        d, verdict, damping = jnp.diagonal(found.rotated), found.verdict, self.eps
        if last is not None:
            assert verdict.eigenvalues is not None and verdict.damping is not None
            d = jnp.where(found.changed, d, verdict.eigenvalues)
            damping = verdict.damping.astype(last.dtype)
        floor = rounding_floor(found.rotated, self.root, self.sides)
        roots = root_eigenvalues(d, self.root, damping, self.damping_mode, floor)
        x = from_eigen(found.basis, roots)
        norm = jnp.linalg.norm(found.rotated)
        off = jnp.linalg.norm(found.rotated - jnp.diag(jnp.diagonal(found.rotated)))
        # All-zero statistics produce no root: it would consist of damping alone.
        live = magnitude(found.rotated) > 0
        good = live & found.sound & jnp.isfinite(magnitude(x)) & (found.changed | ~verdict.refresh)
        new = factor._replace(
            inverse_root=self.storage.encode_root(x),
            error=jnp.where(norm > 0, off / jnp.where(norm > 0, norm, 1), 0).astype(jnp.float32),
            eigenvalues=None if last is None else d,
            damping=None if last is None else damping,
        )
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, factor)
        return kept._replace(
            statistic=found.stored.statistic,
            eigenvectors=found.stored.basis,
            eigenvalues=jax.tree.map(lambda d: jnp.where(found.sound, d, 0), kept.eigenvalues),
            proxy=verdict.proxy,
            counts=factor.counts.plus(
                checks=1,
                refreshes=verdict.refresh & good,
                rejected=~good,
                restarted=~found.sound,
            ),
        )
