r"""Statistics in their bases, which follow them, and roots made of their eigenvalues.

A side keeps its statistic as $H = U^\top L U$. It averages the Gram matrix of
$X = U_L^\top G\, U_R$, which is $U_L^\top G G^\top U_L$, because the other basis cancels; with
statistics of whitened gradients, the inverses of the other side's eigenvalues first divide the
columns of $X$. A refresh is a map from $H$ to a turn of the basis (`linalg/_turns.py`); $X$ and the
first moments, which are kept in the bases, turn along.

*Roots* are not stored: with $h = \mathrm{diag}(H)$ at the last refresh,

$$L^{-1/p} M R^{-1/p} \approx U_L\, \mathrm{diag}(r(h_L))\, U_L^\top M U_R\,
\mathrm{diag}(r(h_R))\, U_R^\top$$

with the damping modes, the range and the rounding floors of `linalg/_inverse_root.py` and
`_noise.py`. Before the first refresh they are identities. After rotations the rest off the diagonal
of $H$ is of second order, and the error of the root's eigenvalues is of second order in that.

*Storage.* `storage/_graded.py` encodes $H$. Where a storage rounds the basis, its turn is the
product of the stored bases, made orthonormal; a rotation that is smaller than a gap between their
codes stays in $H$ until it has grown.

*Damage.* A basis that is not finite, or far from orthonormal, starts anew at the identity with its
statistic. Averaged eigenvalues that are not finite start anew at the next step, because those of
one side make the other's. `restarted` counts both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Moments, put_moments, take_moments
from .._side import LEFT, Side
from .._trees import widened
from ..linalg._inverse_root import near_one, root_eigenvalues, rounding_floor
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals
from ..linalg._products import at, exact_product
from ..linalg._turns import SHORT, SHORT_FOR_ROOTS, orthonormal, straightened, turned
from ..refresh._policy import Check, RootDamping, Verdict, verdict_of
from ..storage._graded import Graded
from ._factor import Factor, Pair, Renewed, SideRule, each_side
from ._noise import eigenvalue_floor, without_noise
from ._whitened import inverse_roots, starting_multiple


class InverseRoots(NamedTuple):
    """The settings of inverse roots."""

    root: Any  # p
    eps: Any
    damping_mode: str
    sides: int  # how many roots a matrix is multiplied by


@dataclasses.dataclass(frozen=True)
class BasisRule(SideRule):
    """The settings of the bases of both sides."""

    whiten: bool  # whether statistics are those of whitened gradients
    roots: InverseRoots | None  # that are made of the bases

    @property
    def statistics(self) -> Graded:
        return Graded(self.storage)

    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        order, dtype, examined = len(eye), eye.dtype, self.policy.examines is not None
        fields: dict[str, Any] = {"basis": self.storage.encode_basis(eye, None)}
        if examined or self.roots is not None:
            fields["eigenvalues"] = jnp.zeros((*batch, order), dtype)
        if self.roots is None and self.whiten:
            fields["spectrum"] = jnp.full((*batch, order), self.initial, dtype)
        if self.roots is not None and examined:
            fields["damping"] = jnp.full(batch, self.roots.eps, dtype)
        if examined:
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

        Where inverses amplify rounding, of whitened gradients and roots, products are in full
        precision, unless they have a level.
        """
        amplified = self.whiten or self.roots is not None
        exactly = jax.default_matmul_precision("highest") if amplified else nullcontext()
        with exactly:
            return self.moved(widened(g), factors, count)

    def whitened(
        self, x: jax.Array, factors: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Pair]:
        """`X μ^(-1/2) / √n` and `λ^(-1/2) X / √m` for the statistics of both sides.

        Also their start, and factors with new averages of eigenvalues.
        """
        sides = max(1, sum(factor is not None for factor in factors))
        start = starting_multiple(x, sides, self.initial, x.dtype)

        def sound(side: Side, factor: Any) -> Factor:
            """With averages that can be used: those of zeros and damaged ones start anew."""
            damaged = ~jnp.isfinite(factor.spectrum).all(axis=-1)
            empty = ~jnp.any(factor.spectrum != 0, axis=-1) | damaged
            spectrum = jnp.where(empty[..., None], start[..., None], factor.spectrum)
            counts = factor.counts.plus(restarted=damaged)
            return factor._replace(spectrum=spectrum, counts=counts)

        def scale(side: Side, factor: Any) -> jax.Array:
            ones = jnp.ones((*x.shape[:-2], side.order(x)), x.dtype)
            if factor is None:
                return ones
            if factor.spectrum is not None:
                return inverse_roots(factor.spectrum)
            unused = jnp.max(factor.eigenvalues, axis=-1, keepdims=True) == 0
            rooted = self.root_of(factor, in_bases=True)
            return jnp.where(unused, inverse_roots(start[..., None] * ones), rooted)

        def averaged(side: Side, factor: Any, other: jax.Array) -> Factor:
            mean = jnp.mean(x**2 * other**2, axis=side.other_axis)
            new = self.b2 * factor.spectrum + (1 - self.b2) * mean
            # As with statistics: a gradient that is not finite leaves the average as it is.
            finite = jnp.isfinite(new).all(axis=-1, keepdims=True)
            spectrum = jnp.where(finite, new, factor.spectrum).astype(x.dtype)
            return factor._replace(spectrum=spectrum)

        if self.roots is None:
            factors = each_side(sound, factors)
        by_left, by_right = (
            jnp.expand_dims(scale(side, factor), side.other_axis)
            for side, factor in zip(Side, factors, strict=True)
        )
        if self.roots is None:
            factors = each_side(averaged, factors, (by_right, by_left))
        m, n = x.shape[-2:]
        return (x * by_right / n**0.5, x * by_left / m**0.5), start, factors

    def root_of(self, factor: Factor, *, in_bases: bool) -> jax.Array:
        """The eigenvalues `(..., d)` of a side's inverse root; 1 before its first refresh.

        `in_bases`: with the floor of `_noise.py`.
        """
        assert self.roots is not None and factor.eigenvalues is not None
        d, (root, eps, mode, sides) = factor.eigenvalues, self.roots
        damping = eps if factor.damping is None else factor.damping[..., None]
        floor = eigenvalue_floor(d.dtype) if in_bases else rounding_floor(d, root, sides)
        scaled = near_one(jnp.max(d, axis=-1, keepdims=True), root, damping, mode)
        roots = root_eigenvalues(d * scaled.by, root, scaled.eps, mode, floor) * scaled.back
        # An infinite entry would make a finite root: damage must show, so that the guard sees it.
        sound = jnp.isfinite(d).all(axis=-1, keepdims=True) & jnp.isfinite(damping)
        roots = jnp.where(sound, roots, jnp.nan)
        return jnp.where(jnp.max(d, axis=-1, keepdims=True) == 0, 1, roots)

    def directed(self, m: jax.Array, factors: Pair, count: jax.Array) -> jax.Array:
        """The product of the roots of both sides with `m (..., m, n)`, which is in the bases."""
        assert self.roots is not None
        m = widened(m)
        exact = all(map(self.storage.exact, m.shape[-2:])) and self.roots.sides == 2
        if exact:
            eigenvalues: list[Any] = [factor and factor.eigenvalues for factor in factors]
            m = without_noise(m, *eigenvalues)
        for side, factor in zip(Side, factors, strict=True):
            if factor is not None:
                m = m * jnp.expand_dims(self.root_of(factor, in_bases=exact), side.other_axis)
        return self.moved(m, factors, count, back=True)

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

    def _check(self, factor: Factor, h: jax.Array, d: Any) -> Check:
        damping, sizes = None, [magnitude(d)]
        if self.roots is not None:
            assert factor.damping is not None
            damping = RootDamping(factor.damping.astype(h.dtype), self.roots.eps, self.roots.root)
            sizes.append(factor.damping.astype(h.dtype))
        # Eigenvalues of 0 are those of a basis that no refresh has turned.
        first = ~(jnp.isfinite(jnp.stack(sizes)).all() & (sizes[0] > 0))
        return Check(h, d, first, damping)

    def renewed(self, factor: Factor, h: jax.Array, moments: Moments, side: Side | None) -> Renewed:
        """The basis turns, and with it the statistic and the moments."""
        u, first = self.storage.decode_basis(factor.basis), factor.refreshes == 0

        def again(h: jax.Array) -> jax.Array:
            check = self._check(factor, h, diagonals(h))
            return verdict_of(self.policy, check._replace(first=jnp.bool_(False))).refresh

        turn = self.method.turn(u, h, again, SHORT if self.roots is None else SHORT_FOR_ROOTS)
        coded = self.storage.encode_basis(turn.basis, factor.basis)
        matrix, new = turn.matrix, turn.statistic
        if not self.storage.exact(len(h)):
            used = self.storage.decode_basis(coded)
            matrix, _, _ = straightened(exact_product(u, used, transpose_a=True))
            new = turned(h, matrix)
        d, spectrum, damping = diagonals(new), factor.spectrum, factor.damping
        eigenvalues = jax.tree.map(lambda old: d.astype(old.dtype), factor.eigenvalues)
        if spectrum is not None:
            kept = spectrum if turn.order is None else spectrum[turn.order]
            # The averages so far may be those of the identity as a basis.
            spectrum = jnp.where(turn.keeps & ~first, kept, jnp.maximum(d, 0))
        if damping is not None and self.roots is not None:
            damping = jnp.zeros_like(damping) + self.roots.eps
        stored = self.statistics.encode_factor(new, factor.statistic)
        # If the turn is not finite, neither is what it made of the statistic.
        good = jnp.isfinite(magnitude(new)) & ~self.statistics.failed(stored, factor.statistic)
        factor = factor._replace(statistic=stored, basis=coded, eigenvalues=eigenvalues)
        factor = factor._replace(spectrum=spectrum, damping=damping)
        moments = _turned_moments(moments, matrix, side, turn.order)
        return Renewed(factor, moments, good, jnp.bool_(False))


def _turned_moments(
    moments: Moments, turn: jax.Array, side: Side | None, order: jax.Array | None
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
