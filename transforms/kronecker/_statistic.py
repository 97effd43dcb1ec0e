r"""Running second moments of a gradient's sides and what is made of them, however stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._guard import is_usable, where_usable
from ..linalg._numerics import HIGHEST
from ..linalg._products import gram_of, times_transposed, transposed_times
from ..refresh._due import visit_all
from ..storage._storage import Storage

SIDES = ("both", "left", "right", "smaller")


def has_side(sides: str, side: str, shape: tuple[int, ...], square: str = "left") -> bool:
    """Whether "left" or "right" is among the `sides` of matrices of this shape.

    "smaller" is the side of the smaller order, and `square` if they are equal.
    """
    m, n = shape[-2:]
    smaller = square if m == n else ("left" if m < n else "right")
    return sides in ("both", side) or (sides == "smaller" and smaller == side)


@dataclasses.dataclass(frozen=True)
class StatisticRule:
    """How statistics are averaged and kept."""

    storage: Storage
    b2: Any  # None sums

    def one_by_one(self, *orders: int) -> bool:
        """Whether matrices of one of these orders are to be decoded one at a time."""
        return any(map(self.storage.one_by_one, orders))

    def accumulated(
        self,
        factor: Any,
        s: jax.Array,
        left: bool,
        count: jax.Array,
        usable: jax.Array | None = None,
    ) -> Any:
        """The factor with `s sᵀ`, or on the right `sᵀ s`, taken in, for `s (..., m, n)`.

        Matrices that are not `usable (..., 1, 1)` count as zero; `None` means that all are.
        """

        def taken_in(entry: tuple[Any, jax.Array, Any]) -> tuple[Any, jax.Array, Any]:
            stored, s, usable = entry
            old = self.storage.decode_factor(stored)
            gram = gram_of(s.astype(old.dtype), left, HIGHEST)

            def averaged(old: jax.Array, gram: jax.Array) -> jax.Array:
                gram = where_usable(usable, gram)
                return old + gram if self.b2 is None else self.b2 * old + (1 - self.b2) * gram

            # A running average would keep a NaN forever: what is not finite is not taken in. No
            # entry of a Gram matrix is larger than the largest on its diagonal.
            finite = jnp.isfinite(averaged(_diagonal(old), _diagonal(gram))).all(axis=(-2, -1))
            new = averaged(old, gram)
            coded = self.storage.encode_factor(jnp.where(finite[..., None, None], new, old), stored)

            def kept(a: jax.Array, b: jax.Array) -> jax.Array:
                return jnp.where(finite.reshape(*finite.shape, *[1] * (a.ndim - finite.ndim)), a, b)

            return jax.tree.map(kept, coded, stored), s, usable

        entry = (factor.statistic, s, usable)
        if self.one_by_one(s.shape[-2 if left else -1]):
            new, _, _ = visit_all(taken_in, entry, s.shape[:-2], count)
        else:
            new, _, _ = taken_in(entry)
        return factor._replace(statistic=new)

    def is_usable(self, s: jax.Array, left: bool) -> jax.Array:
        """`is_usable` of the matrices that `accumulated` takes in, without a pass over them.

        Their sums of squares are the traces of the Gram matrices, which XLA makes once for both.
        """
        if self.one_by_one(s.shape[-2 if left else -1]):
            return is_usable(s)
        gram = gram_of(s.astype(jnp.promote_types(s.dtype, jnp.float32)), left, HIGHEST)
        return jnp.isfinite(jnp.sum(_diagonal(gram), axis=-1, keepdims=True))

    def between(
        self,
        m: jax.Array,
        sides: Sequence[Any],
        transposed: tuple[bool, bool],
        count: jax.Array,
    ) -> jax.Array:
        """`A m B` for `m (..., rows, columns)`, in its dtype, with stored roots or bases A and B.

        Args:
          m: the matrices.
          sides: the stored forms of A and B, None for a side that is left alone.
          transposed: which of them are transposed.
          count: the step, from 1.
        """

        def product(entry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
            m, left, right = entry
            x = m
            if left is not None:
                a = self.storage.decode_root(left)
                x = x.astype(a.dtype)
                x = transposed_times(a, x) if transposed[0] else a @ x
            if right is not None:
                b = self.storage.decode_root(right)
                x = x.astype(b.dtype)
                x = times_transposed(x, b) if transposed[1] else x @ b
            return x.astype(m.dtype), left, right

        entry = (m, sides[0], sides[1])
        orders = [d for d, side in zip(m.shape[-2:], sides, strict=True) if side is not None]
        if self.one_by_one(*orders):
            return visit_all(product, entry, m.shape[:-2], count)[0]
        return product(entry)[0]


def _diagonal(x: jax.Array) -> jax.Array:
    """The diagonals `(..., 1, d)` of `x (..., d, d)`."""
    return jnp.diagonal(x, axis1=-2, axis2=-1)[..., None, :]
