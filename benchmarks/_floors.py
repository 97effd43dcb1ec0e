"""The least work of a method: its matrix products alone, between refreshes.

A floor is a step on one gradient with arrays of its own, which stand in for roots, bases and
moments. It multiplies as often as the method has to, in the method's precision (`HIGHEST` for
products that feed a root or a basis), and does nothing else: no momentum, no division, no routing.
Methods that decompose at every step have their decomposition beside the products. Barriers keep XLA
from joining products between which the method has work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

import curvax
from curvax.transforms._side import side_of
from curvax.transforms.linalg._polar import _polynomial, polar_qr_svd
from curvax.transforms.linalg._products import gram

from ._timing import Program

HIGHEST = jax.lax.Precision.HIGHEST
B2 = 0.95
QUINTIC = curvax.NEWTON_SCHULZ_COEFFICIENTS["quintic"][0]


class Floor(Protocol):
    """One gradient's part of it."""

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """The inputs of the step beside an `m × n` gradient."""
        ...

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """The arrays, perhaps changed, and the results of the products."""
        ...


def program(floor: Floor, grads: Any) -> Program:
    """The floor for a whole tree of gradients."""
    leaves = jax.tree.leaves(grads)

    def step(state: list[Any], leaves: list[jax.Array]) -> Any:
        pairs = [floor.step(g, arrays) for g, arrays in zip(leaves, state, strict=True)]
        return [arrays for arrays, _ in pairs], [update for _, update in pairs]

    return Program(step, [floor.arrays(*g.shape) for g in leaves], leaves)


def square(n: int) -> jax.Array:
    """In the place of a factor, a root or a basis."""
    return jnp.eye(n) + 0.1


def exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product that feeds a root or a basis."""
    return jnp.matmul(a, b, precision=HIGHEST)


def averaged(factor: jax.Array, g: jax.Array) -> jax.Array:
    """A factor and the statistic of a step."""
    return B2 * factor + (1 - B2) * exact(g, g.mT)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Five iterations on the smaller side, from a normalized matrix."""
    side = side_of("smaller", x)
    for count in (3, 2) if max(x.shape) >= 2 * min(x.shape) else (1,) * 5:
        x = side.times(_polynomial(gram(x, side), [QUINTIC] * count), x)
    return x


@dataclasses.dataclass(frozen=True)
class Orthogonalization:
    """The polar factor of a momentum, and nothing else: Newton-Schulz or SVD."""

    exact: bool

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """A momentum with norm 1."""
        return [jax.random.normal(jax.random.key(m), (m, n)) / (m * n) ** 0.5]

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Five iterations of three products, or a decomposition and a product."""
        del g
        polar = curvax.polar_svd if self.exact else newton_schulz
        return arrays, polar(arrays[0])


@dataclasses.dataclass(frozen=True)
class Roots:
    """Shampoo: a root on either side, and where statistics are due their two products."""

    statistics: bool

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """Roots and factors."""
        return [square(k) for k in (m, n)] + [square(k) for k in (m, n) if self.statistics]

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Two products, or four."""
        left, right, *factors = arrays
        factors = [averaged(f, x) for f, x in zip(factors, (g, g.mT), strict=False)]
        return [left, right, *factors], left @ g @ right


@dataclasses.dataclass(frozen=True)
class Rotations:
    """SOAP and Eigen-Adam: into the basis and back, and the statistics."""

    both: bool  # sides, or the left one alone

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """Bases and factors."""
        return [square(k) for k in ((m, n) if self.both else (m,)) * 2]

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Two products for every statistic's one."""
        if not self.both:
            left, factor = arrays
            inside = jax.lax.optimization_barrier(exact(left.mT, g))
            return [left, averaged(factor, g)], exact(left, inside)
        left, right, *factors = arrays
        inside = jax.lax.optimization_barrier(exact(exact(left.mT, g), right))
        factors = [averaged(f, x) for f, x in zip(factors, (g, g.mT), strict=True)]
        return [left, right, *factors], exact(exact(left, inside), right.mT)


@dataclasses.dataclass(frozen=True)
class OneRoot:
    """ASGO: its statistic and its root, on the left where `m < n`."""

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """A root and a factor."""
        return [square(min(m, n)), square(min(m, n))]

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Two products."""
        root, factor = arrays
        left = g.shape[0] < g.shape[1]
        factor = averaged(factor, g if left else g.mT)
        return [root, factor], root @ g if left else g @ root


@dataclasses.dataclass(frozen=True)
class Projection:
    """Low-rank methods: into the subspace, the work there, and back."""

    rank: int
    larger: bool = False  # the side that is projected
    back: bool = True
    inside: str = ""  # "tracked", "svd" or "newton_schulz"

    def on_left(self, m: int, n: int) -> bool:
        """Whether the rows are projected."""
        return m >= n if self.larger else m <= n

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """A basis, and the tracked moment."""
        order = m if self.on_left(m, n) else n
        tracked = [square(self.rank)] if self.inside == "tracked" else []
        return [jnp.eye(order, self.rank) + 0.1, *tracked]

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Products along the rank."""
        u, *tracked = arrays
        left = self.on_left(*g.shape)
        g = g if left else g.mT
        low = jax.lax.optimization_barrier((u[None].mT @ g[None])[0])
        if tracked:
            tracked = [averaged(tracked[0], low)]
        elif self.inside == "svd":
            low = polar_qr_svd(low)
        elif self.inside == "newton_schulz":
            low = newton_schulz(low / jnp.linalg.norm(low))
        update = u @ low if self.back else low
        return [u, *tracked], update if left else update.mT


@dataclasses.dataclass(frozen=True)
class RankOne:
    """RACS: five rounds of a product of the squares with a vector on either side."""

    def arrays(self, m: int, n: int) -> list[jax.Array]:
        """Nothing."""
        del m, n
        return []

    def step(self, g: jax.Array, arrays: list[jax.Array]) -> Any:
        """Ten products with a vector."""
        squares = jnp.square(g)

        def iteration(_: int, q: jax.Array) -> jax.Array:
            s = squares.mT @ q / jnp.sum(q * q)
            return squares @ s / jnp.sum(s * s)

        return arrays, jax.lax.fori_loop(0, 5, iteration, jnp.ones(g.shape[0]))


FLOORS: dict[str, Callable[[int], Floor]] = {
    "Newton-Schulz": lambda rank: Orthogonalization(False),
    "SVD": lambda rank: Orthogonalization(True),
    "rank one": lambda rank: RankOne(),
    "one root": lambda rank: OneRoot(),
    "two roots": lambda rank: Roots(False),
    "two roots, statistics": lambda rank: Roots(True),
    "one basis": lambda rank: Rotations(False),
    "two bases": lambda rank: Rotations(True),
    "projection": Projection,
    "projection, tracked": lambda rank: Projection(rank, inside="tracked"),
    "projection, not back": lambda rank: Projection(rank, back=False),
    "larger projection, SVD": lambda rank: Projection(rank, larger=True, inside="svd"),
    "larger projection, Newton-Schulz": lambda rank: Projection(
        rank, larger=True, inside="newton_schulz"
    ),
}
"""By the names that rows of the registry call them, from a rank."""
