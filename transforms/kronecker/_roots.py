r"""Inverse roots: made of bases and eigenvalues, or stored.

*Of bases*, with $h = \mathrm{diag}(H)$ at the last refresh (`_bases.py`):

$$L^{-1/p} M R^{-1/p} \approx U_L\, \mathrm{diag}(r(h_L))\, U_L^\top M U_R\,
\mathrm{diag}(r(h_R))\, U_R^\top$$

with the damping modes and the range of `linalg/_inverse_root.py`. After rotations the rest off the
diagonal of $H$ is of second order, and the error of the root's eigenvalues is of second order in
that. *Stored* roots are those of `inverse_root`, of statistics in the gradient's own coordinates.
Before the first refresh a root is the identity.

*Noise* of a gradient is its part outside of the ranges of both factors, which roots of both sides
raise over the rest by up to $(d_{\max}/f)^{2/p}$, where $f$ is the damped rounding of an eigenvalue
of 0. A gradient of low rank has only its rounding there. For $p = 2$ this rounding, and that of the
products with the bases, would become the larger part of the direction. So the entries of
$X = U_L^\top G\, U_R$ that have such eigenvalues, $d \le 8\,\mathrm{eps}\,d_{\max}$ at the last
refresh, on both sides become 0, if the norm of all of them is at most
$\sqrt{\max(m, n)}\,\mathrm{eps}\,\|G\|$: five times the rounding of a gradient, and less than
the part of it that is new since the refresh. First directions of gradients of rank 1 and 4 then
have at most 1/320 of their length outside of the gradient's spaces, with any damping. Roots need no
other floor than $12\,\mathrm{eps}\,d_{\max}$, which keeps the rounding of near-singular gradients
from turning directions. From $\epsilon = 12\,\mathrm{eps}\,d_{\max}$ on, directions in float32 are
within 0.02 of those in float64 (`tests/optimizers/test_rounding.py`). This is for bases of both
sides in a storage that does not round; others have the floor of `linalg/_inverse_root.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Moments
from .._side import LEFT, RIGHT, Side
from .._trees import widened
from ..linalg._inverse_root import near_one, root_eigenvalues, rounding_floor
from ..linalg._numerics import EIGENVALUE_NOISE, HIGHEST, magnitude
from ..linalg._products import multiplied
from ..linalg._turns import SHORT_FOR_ROOTS, Turn
from ..refresh._policy import RootDamping
from ..storage._storage import Storage
from ._bases import BasisRule
from ._factor import Factor, Pair, Renewed, SideRule, each_side
from ._whitened import inverse_roots, starting_multiple, whitened_sources

FLOOR = 12.0
"""Roots raise damped eigenvalues to at least this multiple of `eps · d_max`. Below 10, directions
on another mesh differ by more than `docs/distribution.md` promises."""


class InverseRoots(NamedTuple):
    """The settings of inverse roots."""

    root: Any  # p
    eps: Any
    damping_mode: str
    sides: int  # how many roots a matrix is multiplied by


@dataclasses.dataclass(frozen=True)
class BasisRootRule(BasisRule):
    """The settings of roots that are made of the bases of both sides."""

    roots: InverseRoots
    short, amplifies = SHORT_FOR_ROOTS, True

    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        fields = super().first_fields(batch, eye)
        fields["eigenvalues"] = jnp.zeros((*batch, len(eye)), eye.dtype)
        if self.policy.examines is not None:
            fields["damping"] = jnp.full(batch, self.roots.eps, eye.dtype)
        return fields

    def whitened(
        self, x: jax.Array, factors: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Pair]:
        """`X μ^(-1/2) / √n` and `λ^(-1/2) X / √m`, which statistics average, and their start.

        A side that no refresh has turned counts as the start.
        """
        sides = max(1, sum(factor is not None for factor in factors))
        start = starting_multiple(x, sides, self.initial, x.dtype)

        def scale(side: Side, factor: Any) -> jax.Array:
            unused = jnp.max(factor.eigenvalues, axis=-1, keepdims=True) == 0
            first = inverse_roots(start[..., None] * jnp.ones(factor.eigenvalues.shape, x.dtype))
            return jnp.where(unused, first, self.root_of(factor, in_bases=True))

        return whitened_sources(x, each_side(scale, factors))[0], start, factors

    def root_of(self, factor: Factor, *, in_bases: bool) -> jax.Array:
        """The eigenvalues `(..., d)` of a side's inverse root; 1 before its first refresh.

        `in_bases`: with `eigenvalue_floor`.
        """
        assert factor.eigenvalues is not None
        d, (root, eps, mode, sides) = factor.eigenvalues, self.roots
        damping = eps if factor.damping is None else factor.damping[..., None]
        floor = eigenvalue_floor(d.dtype) if in_bases else rounding_floor(d, root, sides)
        scaled = near_one(jnp.max(d, axis=-1, keepdims=True), root, damping, mode)
        # Shampoo, line 11; ASGO, line 13; FOAM, lines 4, 14, 20
        roots = root_eigenvalues(d * scaled.by, root, scaled.eps, mode, floor) * scaled.back
        # An infinite entry would make a finite root: damage must show, so that the guard sees it.
        sound = jnp.isfinite(d).all(axis=-1, keepdims=True) & jnp.isfinite(damping)
        roots = jnp.where(sound, roots, jnp.nan)
        return jnp.where(jnp.max(d, axis=-1, keepdims=True) == 0, 1, roots)

    def directed(self, m: jax.Array, factors: Pair, count: jax.Array) -> jax.Array:
        """The product of the roots of both sides with `m (..., m, n)`, which is in the bases."""
        m = widened(m)
        exact = all(map(self.storage.exact, m.shape[-2:])) and self.roots.sides == 2
        if exact:
            eigenvalues: list[Any] = [factor and factor.eigenvalues for factor in factors]
            m = without_noise(m, *eigenvalues)
        for side, factor in zip(Side, factors, strict=True):
            if factor is not None:
                m = m * jnp.expand_dims(self.root_of(factor, in_bases=exact), side.other_axis)
        return self.moved(m, factors, count, back=True)  # Shampoo, line 15; ASGO, lines 18, 20

    def root_damping(self, factor: Factor, dtype: Any) -> RootDamping:
        assert factor.damping is not None
        return RootDamping(factor.damping.astype(dtype), self.roots.eps, self.roots.root)

    def with_eigenvalues(self, factor: Factor, d: Any, turn: Turn, first: Any) -> Factor:
        factor = super().with_eigenvalues(factor, d, turn, first)
        if factor.damping is None:
            return factor
        # FOAM, lines 3, 19
        return factor._replace(damping=jnp.zeros_like(factor.damping) + self.roots.eps)


@dataclasses.dataclass(frozen=True)
class StoredRootRule(SideRule):
    """The settings of roots that are stored, of statistics in the gradient's coordinates."""

    roots: InverseRoots

    @property
    def statistics(self) -> Storage:
        return self.storage

    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        error = jnp.zeros(batch, jnp.float32)
        return {"inverse_root": self.storage.encode_root(eye), "error": error}

    def entered(self, g: jax.Array, factors: Pair, count: jax.Array) -> jax.Array:
        return g

    def whitened(
        self, g: jax.Array, factors: Pair, count: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, Pair]:
        """`G R^(-1/2) / √n` and `L^(-1/2) G / √m`, which statistics average, and their start.

        A side without a root counts as the start, a side without a factor as the identity.
        """
        dtype = np.promote_types(g.dtype, np.float32)
        start = starting_multiple(g, self.roots.sides, self.initial, dtype)
        exact, size = functools.partial(self.apply_root, precision=HIGHEST), jnp.sqrt(start)
        inverse = jnp.where(size == 0, 0, 1 / jnp.where(size == 0, 1, size))[..., None, None]

        def by(side: Side) -> jax.Array:
            work, factor = g.astype(dtype), factors[side is RIGHT]
            if factor is not None:
                roots = [factor.inverse_root if other is side else None for other in Side]
                rooted = self.two_sided(exact, work, roots, count)
                work = jnp.where((factor.refreshes > 0)[..., None, None], rooted, work * inverse)
            return work / side.order(g) ** 0.5

        return (by(RIGHT), by(LEFT)), start, factors

    def apply_root(
        self, stored: Any, x: jax.Array, side: Side, precision: jax.lax.PrecisionLike = None
    ) -> jax.Array:
        """The product of a stored root with `x (..., m, n)`, on this side."""
        root = self.storage.decode_root(stored)
        x = x.astype(root.dtype)
        precision = self.products.step or precision
        return multiplied(*((root, x) if side is LEFT else (x, root)), precision)

    def directed(self, m: jax.Array, factors: Pair, count: jax.Array) -> jax.Array:
        """The product of the roots of both sides with `m (..., m, n)`."""
        roots = [factor and factor.inverse_root for factor in factors]
        return self.two_sided(self.apply_root, m, roots, count)  # Shampoo, line 15

    def refreshed_with(
        self, g: jax.Array, factors: Pair, state: Any, count: jax.Array, *along: Any
    ) -> tuple[Pair, Any, Sequence[Any]]:
        """`refreshed`, and what is not in a basis, as it is."""
        return self.refreshed(g, factors, Moments([], []), count)[0], state, along

    def renewed(self, factor: Factor, h: jax.Array, moments: Moments, side: Side) -> Renewed:
        root, eps, mode, sides = self.roots
        floor = rounding_floor(h, root, sides)
        x, error, indefinite = self.method.solved(h, root, eps, mode, floor)  # Shampoo, line 11
        factor = factor._replace(inverse_root=self.storage.encode_root(x))
        factor = factor._replace(error=error.astype(jnp.float32))
        return Renewed(factor, moments, jnp.isfinite(magnitude(x)), indefinite)


def eigenvalue_floor(dtype: jax.typing.DTypeLike) -> float:
    """The least share of the largest eigenvalue that a root takes for an eigenvalue."""
    return FLOOR * float(jnp.finfo(dtype).eps)


def without_noise(x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """`x (..., m, n)` in bases with eigenvalues `(..., m)` and `(..., n)`, without its noise."""
    low = _is_noise(left)[..., :, None] & _is_noise(right)[..., None, :]
    size, norm = (jnp.linalg.norm(y, axis=(-2, -1)) for y in (jnp.where(low, x, 0), x))
    empty = size <= max(x.shape[-2:]) ** 0.5 * float(jnp.finfo(x.dtype).eps) * norm
    return jnp.where(low & empty[..., None, None], 0, x)


def _is_noise(d: jax.Array) -> jax.Array:
    """Which eigenvalues `(..., d)` are noise beside the largest; none before a refresh."""
    largest = jnp.max(d, axis=-1, keepdims=True)
    return (d <= EIGENVALUE_NOISE * float(jnp.finfo(d.dtype).eps) * largest) & (largest > 0)
