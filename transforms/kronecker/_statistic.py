r"""Running second moments of a gradient's sides, and products with their roots or bases."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._side import Side
from .._trees import where_entries
from ..linalg._loops import visit_all, visit_in_turn
from ..linalg._platforms import diagonals
from ..linalg._precision import Products, at
from ..linalg._products import gram
from ..storage._storage import Storage

SIDES = ("both", "left", "right", "smaller")


@dataclasses.dataclass(frozen=True)
class StatisticRule:
    """How statistics are averaged and stored."""

    storage: Storage
    b2: Any  # decay rate; None sums
    products: Products = dataclasses.field(default=Products(), kw_only=True)

    def encoded(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of a statistic `x (..., d, d)`; `previous` is the last one, or None."""
        return self.storage.encode_factor(x, previous)

    def decoded(self, stored: Any) -> jax.Array:
        """The statistic of a stored form."""
        return self.storage.decode_factor(stored)

    def check_dtype(self, dtype: Any) -> None:
        """Requires float32 if products have levels.

        Raises:
          ValueError: naming the dtype.
        """
        if dtype != jnp.float32 and self.products != Products():
            raise ValueError(
                f"products must be None for parameters of {dtype}, whose products are in full "
                f"precision; got {self.products!r}."
            )

    def decodes_singly(self, *orders: int) -> bool:
        """Whether to decode matrices of one of these orders one at a time."""
        return any(map(self.storage.decodes_singly, orders))

    def accumulated(
        self,
        factor: Any,
        s: jax.Array,
        side: Side,
        count: jax.Array,
        start: jax.Array | None = None,
    ) -> Any:
        """The factor after accumulating `s sᵀ`, or `sᵀ s` on the right, for `s (..., m, n)`.

        A statistic of zeros starts at the multiple `start (...)` of the identity, if it is given.
        """

        def accumulate(stored: Any, given: tuple[jax.Array, jax.Array | None]) -> Any:
            s, start = given
            old = self.decoded(stored)
            if start is not None:
                empty = ~jnp.any(_diagonal(old) != 0, axis=(-2, -1))[..., None, None]
                eye = jnp.broadcast_to(jnp.eye(side.order(s), dtype=old.dtype), old.shape)
                old = jnp.where(empty, start[..., None, None] * eye, old)
            square = gram(s.astype(old.dtype), side, self.products.statistics)

            def averaged(old: jax.Array, square: jax.Array) -> jax.Array:
                return old + square if self.b2 is None else self.b2 * old + (1 - self.b2) * square

            # A running average would keep a NaN forever, so the old statistic stays if the new one
            # is not finite. The diagonal decides: it holds the largest entry of a Gram matrix.
            finite = jnp.isfinite(averaged(_diagonal(old), _diagonal(square))).all(axis=(-2, -1))
            new = averaged(old, square)
            coded = self.encoded(jnp.where(finite[..., None, None], new, old), stored)
            return where_entries(finite, coded, stored)

        given, orders = (s, start), [side.order(s)]
        new = self._each(accumulate, factor.statistic, given, s.shape, orders, count)
        return factor._replace(statistic=new)

    def at_refresh(self, visit: Callable[..., Any]) -> Callable[..., Any]:
        """`visit`, with products at the level of refreshes."""

        def leveled(*given: Any) -> Any:
            with at(self.products.refresh):
                return visit(*given)

        return leveled

    def kept_statistic(self, sound: jax.Array, stored: Any, first: jax.Array) -> Any:
        """A stored statistic, or the initial one `first (d, d)` if it is not `sound`."""
        anew = self.encoded(first, None)
        return jax.tree.map(lambda old, new: jnp.where(sound, old, new), stored, anew)

    def two_sided(
        self,
        product: Callable[[Any, jax.Array, Side], jax.Array],
        m: jax.Array,
        stored: Sequence[Any],
        count: jax.Array,
    ) -> jax.Array:
        """Products of matrices with the stored forms of each side, in the dtype of `m`.

        Args:
          product: maps the stored form for a side, `m` and the side to their product.
          m: matrices `(..., rows, columns)`.
          stored: the stored forms of the left and the right side; None leaves a side as it is.
          count: the step, from 1.
        """

        def visit(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            for side, own in zip(Side, stored, strict=True):
                x = x if own is None else product(own, x, side)
            return x.astype(m.dtype)

        return self.visited(visit, m, m, stored, count)

    def visited(
        self,
        visit: Callable[[Any, Any], Any],
        entry: Any,
        m: jax.Array,
        stored: Sequence[Any],
        count: jax.Array,
    ) -> Any:
        """`visit(entry, stored)`, one by one if the stored form of a side of `m` asks for it."""
        return self._each(visit, entry, stored, m.shape, orders_of(m, stored), count)

    def _each(
        self,
        visit: Callable[[Any, Any], Any],
        entry: Any,
        given: Any,
        shape: tuple[int, ...],
        orders: Sequence[int],
        count: jax.Array,
    ) -> Any:
        """`visit(entry, given)`, one matrix at a time if these orders ask for it, or on a TPU."""
        batch = shape[:-2]
        if self.decodes_singly(*orders):
            return visit_all(visit, entry, batch, count, numbers_of(shape, orders), given)
        return visit_in_turn(visit, entry, batch, count, given)

    def reads_singly(self, m: jax.Array, stored: Sequence[Any]) -> bool:
        """Whether to decode the stored forms of the sides of `m` one matrix at a time."""
        return self.decodes_singly(*orders_of(m, stored))


def orders_of(m: jax.Array, stored: Sequence[Any]) -> list[int]:
    """The orders of the stored forms of the sides of `m (..., rows, columns)`."""
    return [d for d, x in zip(m.shape[-2:], stored, strict=True) if x is not None]


def numbers_of(shape: tuple[int, ...], orders: Sequence[int]) -> int:
    """Numbers of the largest matrix among those of a shape and squares of these orders."""
    return max(math.prod(shape[-2:]), *(d * d for d in orders))


def identity(order: int, dtype: Any) -> jax.Array:
    """Made by the program: XLA would take minutes to encode a constant while it compiles."""
    return jax.lax.optimization_barrier(jnp.eye(order, dtype=dtype))


def each_of(batch: tuple[int, ...], stored: Any) -> Any:
    """The stored form of one matrix, for every matrix of a batch.

    Encoding them all would take the memory of decoded matrices, and longer programs.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), stored)


def _diagonal(x: jax.Array) -> jax.Array:
    """The diagonals `(..., 1, d)` of `x (..., d, d)`."""
    return diagonals(x)[..., None, :]
