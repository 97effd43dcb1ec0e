r"""Statistics in their bases, which follow them.

A side keeps its statistic as $H = U^\top L U$. It averages the Gram matrix of
$X = U_L^\top G\, U_R$, which is $U_L^\top G G^\top U_L$, because the other basis cancels. A refresh
is a map from $H$ to a turn of the basis (`linalg/_turns.py`); $X$ and the first moments, which are
kept in the bases, turn along. `BasisRule` is for element-wise transformations in the bases;
`_whitened.py` adds averages of eigenvalues that follow the gradient, and `_roots.py` makes inverse
roots of bases.

*Storage.* `storage/_graded.py` encodes $H$. Where a storage rounds the basis, its turn is the
product of the stored bases, made orthonormal; a rotation that is smaller than a gap between their
codes stays in $H$ until it has grown. *Damage.* A basis that is not finite, or far from
orthonormal, starts anew at the identity with its statistic; `restarted` counts this.
"""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Moments, put_moments, take_moments
from .._side import LEFT, Side
from .._trees import widened
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals
from ..linalg._products import at, exact_product
from ..linalg._turns import SHORT, Turn, orthonormal, straightened, turned
from ..refresh._policy import Check, RootDamping, Verdict, verdict_of
from ..storage._graded import Graded
from ._factor import Factor, Pair, Renewed, SideRule


@dataclasses.dataclass(frozen=True)
class BasisRule(SideRule):
    """The settings of the bases of both sides."""

    short = SHORT  # a shorter rotation is the last of a refresh
    amplifies = False  # whether inverses amplify the rounding of what enters the bases

    @property
    def statistics(self) -> Graded:
        return Graded(self.storage)

    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        fields: dict[str, Any] = {"basis": self.storage.encode_basis(eye, None)}
        if self.policy.examines is not None:
            fields["eigenvalues"] = jnp.zeros((*batch, len(eye)), eye.dtype)
            fields["proxy"] = jnp.zeros(batch, jnp.float32)
        return fields

    # A step

    def moved(
        self, x: jax.Array, factors: Pair, count: jax.Array, *, back: bool = False
    ) -> jax.Array:
        """`U_Lᵀ x U_R` or, `back`, `U_L x U_Rᵀ` for the bases in use, in the dtype of `x`."""

        def product(basis: Any, x: jax.Array, side: Side) -> jax.Array:
            with at(self.products.step):
                opened = self.storage.open_basis(basis, x.shape[side.other_axis])
                return self.storage.rotate(opened, x, side, back)

        bases = [factor and factor.basis for factor in factors]
        return self.two_sided(product, x, bases, count)

    def entered(self, g: jax.Array, factors: Pair, count: jax.Array) -> jax.Array:
        """The gradient in the bases in use, in float32 at least.

        Where its rounding is amplified, products are in full precision, unless they have a level.
        """
        with jax.default_matmul_precision("highest") if self.amplifies else nullcontext():
            return self.moved(widened(g), factors, count)

    # A refresh

    def refreshed_with(
        self, g: jax.Array, factors: Pair, state: Any, count: jax.Array, *along: Any
    ) -> tuple[Pair, Any, Sequence[Any]]:
        """`refreshed`, with the moments of `state` and the arrays `along`, which turn.

        An array that is both turns once.
        """
        first, second = take_moments(state)
        arrays = {id(x): x for x in [*first, *along]}
        factors, moments = self.refreshed(g, factors, Moments([*arrays.values()], second), count)
        new = dict(zip(arrays, moments.first, strict=True))
        own, others = ([new[id(x)] for x in xs] for xs in (first, along))
        return factors, put_moments(state, Moments(own, moments.second)), others

    def largest(self, side: Side, x: Any) -> int:
        """The longer side: moments turn too."""
        return max(x.shape[-2:])

    def with_sound_basis(self, factor: Factor) -> tuple[Factor, jax.Array]:
        """A basis that is far from orthonormal becomes the identity, without eigenvalues."""
        u = self.storage.decode_basis(factor.basis)
        sound = orthonormal(u)
        anew = self.storage.encode_basis(jnp.where(sound, u, jnp.eye(len(u), dtype=u.dtype)), None)
        basis = jax.tree.map(functools.partial(jnp.where, sound), factor.basis, anew)
        eigenvalues = jax.tree.map(lambda d: jnp.where(sound, d, 0), factor.eigenvalues)
        return factor._replace(basis=basis, eigenvalues=eigenvalues), sound

    def verdict(self, factor: Factor, h: jax.Array) -> Verdict:
        """The policy's verdict on the statistic in its basis."""
        if self.policy.examines is None:
            return super().verdict(factor, h)
        return verdict_of(self.policy, self._check(factor, h, factor.eigenvalues), factor.proxy)

    def root_damping(self, factor: Factor, dtype: Any) -> RootDamping | None:
        """The damping of the root that is made of this basis, if one is."""
        return None

    def _check(self, factor: Factor, h: jax.Array, d: Any) -> Check:
        sizes, damping = [magnitude(d)], self.root_damping(factor, h.dtype)
        if damping is not None:
            sizes.append(damping.damping)
        # Eigenvalues of 0 are those of a basis that no refresh has turned.
        first = ~(jnp.isfinite(jnp.stack(sizes)).all() & (sizes[0] > 0))
        return Check(h, d, first, damping)

    def renewed(self, factor: Factor, h: jax.Array, moments: Moments, side: Side) -> Renewed:
        """The basis turns, and with it the statistic and the moments."""

        def again(h: jax.Array) -> jax.Array:
            check = self._check(factor, h, diagonals(h))
            return verdict_of(self.policy, check._replace(first=jnp.bool_(False))).refresh

        u = self.storage.decode_basis(factor.basis).astype(h.dtype)  # of float64 in few bits
        first = factor.refreshes == 0
        turn = self.method.turn(u, h, again, self.short)  # SOAP: EVD
        coded = self.storage.encode_basis(turn.basis, factor.basis)
        if not self.storage.exact(len(h)):
            used = self.storage.decode_basis(coded)
            matrix, _, _ = straightened(exact_product(u, used, transpose_a=True))
            turn = turn._replace(matrix=matrix, statistic=turned(h, matrix))
        new = turn.statistic
        factor = self.with_eigenvalues(factor, diagonals(new), turn, first)
        stored = self.statistics.encode_factor(new, factor.statistic)
        # If the turn is not finite, neither is what it made of the statistic.
        good = jnp.isfinite(magnitude(new)) & ~self.statistics.failed(stored, factor.statistic)
        factor = factor._replace(statistic=stored, basis=coded)
        moments = _turned_moments(moments, turn.matrix, side, turn.order)
        return Renewed(factor, moments, good, jnp.bool_(False))

    def with_eigenvalues(self, factor: Factor, d: Any, turn: Turn, first: Any) -> Factor:
        """A factor with what it keeps of the diagonal `d` after a turn, which may be its first."""
        eigenvalues = jax.tree.map(lambda old: d.astype(old.dtype), factor.eigenvalues)  # FOAM: D
        return factor._replace(eigenvalues=eigenvalues)


def _turned_moments(
    moments: Moments, turn: jax.Array, side: Side, order: jax.Array | None
) -> Moments:
    """Moments in a basis that was multiplied by `turn (d, d)`: first moments turn with it.

    Second moments take the new `order` of its columns, if it has one.
    """
    first, second = moments
    if order is not None:
        second = [v[order] if side is LEFT else v[:, order] for v in second]

    def followed(m: jax.Array) -> jax.Array:
        dtype = np.promote_types(turn.dtype, m.dtype)
        by, wide = turn.astype(dtype), m.astype(dtype)
        x = exact_product(by, wide, transpose_a=True) if side is LEFT else exact_product(wide, by)
        return x.astype(m.dtype)

    return Moments([*map(followed, first)], second)
