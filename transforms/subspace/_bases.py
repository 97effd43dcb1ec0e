r"""Basis finders: how `in_subspace` chooses the subspace that it projects gradients onto.

With tracking, $Q = b_3\, U \tilde Q U^\top + (1-b_3)\, G G^\top$ replaces $GG^\top$. No finder
forms either matrix: it multiplies by it (`check.times`) or decomposes a factor `X` with $X X^\top =
Q$ (`check.factor`). An iteration starts from a basis of $GG^\top$ alone.

Some finders replace some columns of another finder's basis (*switching*, Gong et al.,
arXiv:2502.07752, Algorithm 2 and section F.7). Without switching, the optimizer never learns from
directions outside the leading subspace.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._validate import Value, check_value, checked
from ..linalg._eigh import eigh, leading_vectors, with_fixed_signs
from ..linalg._products import exact_product
from ..linalg._qr import orthogonal_complement, qr

DRAWN = 2**15
"""Numbers are drawn in multiples of so many, by programs that matrices of several shapes share: an
entry's bits depend on its place alone (`jax_threefry_partitionable`)."""


class SubspaceCheck(NamedTuple):
    """The input of a finder for one matrix at a refresh."""

    gradient: jax.Array  # G (m, n), rows are projected; scaled to a largest entry near 1
    basis: jax.Array  # the current U (m, r)
    tracked: jax.Array | None  # Q̃ (r, r), the running second moment of UᵀG; None: no tracking
    b3: Any  # the decay rate of Q̃
    first: jax.Array  # whether this is the first refresh
    key: jax.Array  # random key of this refresh

    def times(self, x: jax.Array) -> jax.Array:
        """`Q x` for `x (m, k)`, which are by columns, as LAPACK has them."""
        # Columns are the rows of `xᵀ`; the barriers keep XLA from moving the transposes.
        rows = jax.lax.optimization_barrier(x.mT)
        inner = jax.lax.optimization_barrier(exact_product(rows, self.gradient))
        product = exact_product(self.gradient, inner.mT).mT
        if self.tracked is not None:  # Alg. 4, line 6
            inside = exact_product(exact_product(rows, self.basis), self.tracked)
            product = self.b3 * exact_product(inside, self.basis.mT) + (1 - self.b3) * product
        return jax.lax.optimization_barrier(product).mT

    def factor(self) -> jax.Array:
        """`X (m, n)` or `(m, r + n)` with `X Xᵀ = Q`, up to a positive factor."""
        if self.tracked is None:
            return self.gradient
        q, d = eigh(self.tracked)
        past = exact_product(self.basis, q * jnp.sqrt(self.b3 * jnp.maximum(d, 0))[None, :])
        return jnp.concatenate([past, jnp.sqrt(1 - self.b3) * self.gradient], axis=1)


class BasisFinder(Value):
    """The type of `basis=`: what chooses the subspace, `U (m, r)`, of one matrix."""

    orthonormal: Any = True
    """Whether the columns of `U` are orthonormal up to rounding."""
    kept: Any = True
    """Whether the state stores `U`. If it does not, each step draws `U` again from the key of the
    last refresh; `find` may then use only the `key` and the shapes of the `check`."""
    random: Any = False
    """Whether `U` does not depend on the gradient."""
    draws: Any = True
    """Whether it takes random numbers at all."""
    starts: Any = False
    """Whether it finds the first `U` in another way: `check.first` is then the same for all
    matrices that are refreshed in one group."""

    @abc.abstractmethod
    def find(self, check: SubspaceCheck, rank: int) -> jax.Array:
        """Computes the basis `(m, rank)`."""

    def directions(self, check: SubspaceCheck, rank: int) -> jax.Array:
        """The basis with any signs, for a finder that fixes signs itself."""
        return self.find(check, rank)


def _by_energy(q: jax.Array, check: SubspaceCheck, rank: int) -> jax.Array:
    """The leading directions of `Q` within the span of `q`, by descending energy."""
    rows = jax.lax.optimization_barrier(q.mT)
    inside = exact_product(rows, check.times(q))
    vectors, _ = eigh((inside + inside.mT) / 2)  # Alg. 10: EVD(V)
    return exact_product(vectors[:, ::-1][:, :rank], rows, transpose_a=True).mT


class _Directions(BasisFinder):
    """Finders that fix signs: once, after all choices between programs."""

    def find(self, check: SubspaceCheck, rank: int) -> jax.Array:
        return with_fixed_signs(self.directions(check, rank))


@dataclasses.dataclass(frozen=True)
class SvdBasis(_Directions):
    draws = False

    def directions(self, check: SubspaceCheck, rank: int) -> jax.Array:
        return leading_vectors(check.factor(), rank)


@dataclasses.dataclass(frozen=True)
class Randomized(_Directions):
    oversampling: int
    iterations: int

    def directions(self, check: SubspaceCheck, rank: int) -> jax.Array:
        rows, width = check.gradient.shape[0], min(rank + self.oversampling, *check.gradient.shape)
        drawn = -(-rows * width // DRAWN) * DRAWN
        q = jax.random.normal(check.key, (drawn,), check.gradient.dtype)
        q = q[: rows * width].reshape(rows, width)
        iterate = lambda _, q: qr(check.times(q))[0]  # noqa: E731
        return _by_energy(jax.lax.fori_loop(0, self.iterations, iterate, q), check, rank)


@dataclasses.dataclass(frozen=True)
class Iterated(_Directions):
    rotate: bool
    start: BasisFinder

    starts = True

    @property
    def draws(self) -> bool:
        return self.start.draws

    def directions(self, check: SubspaceCheck, rank: int) -> jax.Array:

        def started() -> jax.Array:
            return self.start.directions(check._replace(tracked=None), rank)

        def iterated_once() -> jax.Array:
            moved = check.times(check.basis)  # Alg. 10: H
            if self.rotate:
                return _by_energy(qr(moved)[0], check, rank)
            order = jnp.argsort(-jnp.sum(check.basis * moved, axis=0), stable=True)
            return qr(moved[:, order])[0]

        return jax.lax.cond(check.first, started, iterated_once)


@dataclasses.dataclass(frozen=True)
class Gaussian(BasisFinder):
    normalized: bool
    kept: bool

    orthonormal = False
    random = True

    def find(self, check: SubspaceCheck, rank: int) -> jax.Array:
        # Alg. 9, with variance 1/r; section F.7, with length 1.
        u = jax.random.normal(check.key, (check.gradient.shape[0], rank), check.gradient.dtype)
        return _unit_columns(u) if self.normalized else u / jnp.sqrt(jnp.asarray(rank, u.dtype))


@dataclasses.dataclass(frozen=True)
class Switched(BasisFinder):
    source: str
    leading: int
    finder: BasisFinder

    @property
    def orthonormal(self) -> bool:
        return self.source != "gaussian"

    @property
    def starts(self) -> bool:
        return self.finder.starts

    def stay(self, rank: int, rows: int) -> int:
        """The number of leading columns that stay; more of them if the complement is too small."""
        leading = min(self.leading, rank)
        return max(leading, 2 * rank - rows) if self.source == "complement" else leading

    def find(self, check: SubspaceCheck, rank: int) -> jax.Array:
        inner_key, draws = jax.random.split(check.key)
        u = self.finder.directions(check._replace(key=inner_key), rank)  # Alg. 2, line 2
        rows = u.shape[0]
        leading = self.stay(rank, rows)
        if self.source == "gaussian":
            noise = jax.random.normal(draws, (rows, rank - leading), u.dtype)
            kept = with_fixed_signs(u[:, :leading])
            return jnp.concatenate([kept, _unit_columns(noise)], axis=1)
        rest = orthogonal_complement(u)
        if self.source == "full":
            rest = jnp.concatenate([u[:, leading:], rest], axis=1)
        chosen = jax.random.permutation(draws, rest.shape[1])[: rank - leading]  # line 4
        both = [u[:, :leading], rest[:, chosen]]  # lines 3 and 5
        return with_fixed_signs(jnp.concatenate(both, axis=1))


def _unit_columns(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=0, keepdims=True)


def svd() -> SvdBasis:
    """Computes the leading left singular vectors by an exact SVD: `O(m n min(m, n))`."""
    return SvdBasis()


@checked
def randomized(oversampling: int = 10, *, iterations: int = 1) -> Randomized:
    """Approximates the leading left singular vectors by a randomized range finder: `O(m n r)`.

    It takes the leading directions within the range of `(GGᵀ)^iterations Ω`, for a Gaussian
    `Ω (m, r + oversampling)`, orthonormalized after each product (Halko, Martinsson and Tropp,
    2011, Algorithms 4.4 and 5.3).

    Args:
      oversampling: number of columns beyond the rank.
      iterations: number of products with `GGᵀ` before the last.

    Raises:
      ValueError: if an argument is not a positive integer.
    """
    return Randomized(oversampling, iterations)


@checked
def iterated(*, rotate: bool = True, start: BasisFinder | None = None) -> Iterated:
    """Takes one step of subspace iteration from the current basis: `O(m n r)`.

    Args:
      rotate: whether to rotate the result to the leading eigenvectors within its span (Gong et al.,
        Algorithm 10). Otherwise QR orthonormalizes the columns of `GGᵀU`, by descending energy.
      start: finder of the first basis, from the gradient alone; `None` is `svd()`.

    Raises:
      ValueError: if `start` is not a basis finder.
    """
    start = svd() if start is None else start
    check_finder("start", start)
    return Iterated(rotate, start)


@checked
def gaussian(*, normalized: bool = False, kept: bool = True) -> Gaussian:
    """Draws independent normal entries of variance `1/r` at each refresh.

    Args:
      normalized: whether to scale the columns to length 1 instead.
      kept: whether the state stores the basis; otherwise each step draws it again from its key.
    """
    return Gaussian(normalized, kept)


def complement(leading: int = 40, finder: BasisFinder | None = None) -> Switched:
    """Keeps the leading columns of another basis and draws the others from its complement.

    The columns are drawn uniformly, without replacement, from an orthonormal basis of the
    orthogonal complement, `O(m²r)` (Gong et al., Algorithm 2). If it has too few dimensions, more
    of the leading columns stay.

    Args:
      leading: number of columns that stay, 0 or more; values above the rank count as the rank.
      finder: finder of the other basis; `None` is `iterated()`.

    Raises:
      ValueError: if `leading` is not an integer of at least 0, if the finder's basis is not
        orthonormal, or if the state does not store it.
    """
    return _switched("complement", leading, finder)


def full_basis(leading: int = 40, finder: BasisFinder | None = None) -> Switched:
    """Like `complement`, but draws from the remaining columns and the complement together."""
    return _switched("full", leading, finder)


def gaussian_mix(leading: int = 40, finder: BasisFinder | None = None) -> Switched:
    """Like `complement`, but the other columns are Gaussian vectors of length 1."""
    return _switched("gaussian", leading, finder)


@checked
def _switched(source: str, leading: int, finder: BasisFinder | None) -> Switched:
    finder = iterated() if finder is None else finder
    check_finder("finder", finder)
    if not (finder.orthonormal and finder.kept):
        raise ValueError(
            "finder must give an orthonormal basis that the state stores, such as "
            f"curvax.subspaces.svd(); got {finder!r}."
        )
    return Switched(source, leading, finder)


def check_finder(name: str, value: Any) -> None:
    """Requires a basis finder."""
    check_value(name, value, BasisFinder, "a basis such as curvax.subspaces.svd()")


SWITCHING = {
    "complement": complement(),
    "full_basis": full_basis(),
    "gaussian_mix": gaussian_mix(),
    "gaussian": gaussian(normalized=True),
    "none": iterated(),
    "evd": svd(),
}
"""Alice's bases, by name."""
