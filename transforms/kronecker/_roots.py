"""Stored inverse roots of statistics in the gradient's own coordinates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Moments
from .._side import LEFT, RIGHT, Side
from ..linalg._inverse_root import rounding_floor, solve_root
from ..linalg._numerics import HIGHEST, magnitude
from ..linalg._products import multiplied
from ..storage._storage import Storage
from ._bases import InverseRoots
from ._factor import Factor, Pair, Renewed, SideRule
from ._whitened import starting_multiple


@dataclasses.dataclass(frozen=True)
class RootRule(SideRule):
    """The settings of the stored roots of both sides."""

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
        return self.two_sided(self.apply_root, m, roots, count)

    def refreshed_with(
        self, g: jax.Array, factors: Pair, state: Any, count: jax.Array, *along: Any
    ) -> tuple[Pair, Any, Sequence[Any]]:
        """`refreshed`, and what is not in a basis, as it is."""
        return self.refreshed(g, factors, Moments([], []), count)[0], state, along

    def renewed(self, factor: Factor, h: jax.Array, moments: Moments, side: Side | None) -> Renewed:
        root, eps, mode, sides = self.roots
        floor = rounding_floor(h, root, sides)
        solver, rows = self.method.solver, self.method.rows
        x, error, indefinite = solve_root(h, root, eps, mode, solver, floor, rows)
        factor = factor._replace(inverse_root=self.storage.encode_root(x))
        factor = factor._replace(error=error.astype(jnp.float32))
        return Renewed(factor, moments, jnp.isfinite(magnitude(x)), indefinite)
