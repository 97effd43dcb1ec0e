r"""Running second moments of a gradient's sides, and products with their roots or bases."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._recording import Meaning, is_repeated, record
from .._side import Side
from .._trees import where_entries
from ..linalg._loops import visit_all
from ..linalg._platforms import diagonals
from ..linalg._precision import Products
from ..linalg._products import gram
from ..refresh._due import Refreshing, phases_of
from ..refresh._policy import RefreshPolicy
from ..storage._storage import Storage, StorageRecord

SIDES = ("both", "left", "right", "smaller")


@dataclasses.dataclass(frozen=True)
class StatisticRule(abc.ABC):
    """How statistics are averaged and stored."""

    storage: Storage
    b2: Any  # decay rate; None sums
    policy: RefreshPolicy
    products: Products = dataclasses.field(default=Products(), kw_only=True)

    @abc.abstractmethod
    def start(
        self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None = None
    ) -> Any:
        """The initial states of one side of a batch of matrices."""

    @abc.abstractmethod
    def refreshing(self, side: Side, x: Any) -> Refreshing:
        """What it takes to refresh one side of a matrix of `x (..., m, n)`."""

    def both_started(self, x: Any, sides: Callable[[Any], Sequence[Side]]) -> tuple[Any, Any]:
        """The initial states of both sides of `x (..., m, n)`, `None` for one not in `sides(x)`."""
        dtype = np.promote_types(x.dtype, np.float32)
        if not is_repeated():
            self.check_dtype(dtype)
            for side in sides(x):
                self.record_forms(side.order(x))

        def refreshing(side: Side, x: Any) -> Refreshing | None:
            return self.refreshing(side, x) if side in sides(x) else None

        works = [functools.partial(refreshing, side) for side in Side]
        left, right = (
            self.start(x.shape[:-2], side.order(x), dtype, phase) if side in sides(x) else None
            for side, phase in zip(Side, phases_of(x, self.policy.schedule, works), strict=True)
        )
        return left, right

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

    def record_forms(self, order: int) -> None:
        """Records how factors of this order are stored and refreshed."""
        form = self.storage.describe(order)
        record(StorageRecord(order, form))
        record(Meaning(f"order {order}: {form}"))
        record(Meaning(f"refresh policy: {type(self.policy).__name__}"))

    def numbers(self, x: jax.Array, stored: Sequence[Any]) -> int | None:
        """The `numbers` of `visit_all`: of a matrix's largest array, if it is decoded alone.

        Args:
          x: matrices `(..., m, n)`.
          stored: the stored forms of their left and right side; `None` for a side without one.
        """
        pairs = zip(x.shape[-2:], stored, strict=True)
        orders = [order for order, own in pairs if own is not None]
        if not any(map(self.storage.decodes_singly, orders)):
            return None
        return max(math.prod(x.shape[-2:]), *(order * order for order in orders))

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
                empty = ~jnp.any(diagonals(old)[..., None, :] != 0, axis=(-2, -1))[..., None, None]
                eye = jnp.broadcast_to(jnp.eye(side.order(s), dtype=old.dtype), old.shape)
                old = jnp.where(empty, start[..., None, None] * eye, old)
            square = gram(s.astype(old.dtype), side, self.products.statistics)
            pairs = [[diagonals(x)[..., None, :] for x in (old, square)], (old, square)]
            if self.b2 is None:
                diagonal, new = (a + b for a, b in pairs)
            else:
                diagonal, new = (self.b2 * a + (1 - self.b2) * b for a, b in pairs)
            # A running average would keep a NaN forever, so the old statistic stays if the new one
            # is not finite. The diagonal decides: it holds the largest entry of a Gram matrix.
            finite = jnp.isfinite(diagonal).all(axis=(-2, -1))
            coded = self.encoded(jnp.where(finite[..., None, None], new, old), stored)
            return where_entries(finite, coded, stored)

        numbers = self.numbers(s, [factor if own is side else None for own in Side])
        batch, given = s.shape[:-2], (s, start)
        new = visit_all(accumulate, factor.statistic, batch, count, numbers, given)
        return factor._replace(statistic=new)

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
        return visit_all(visit, entry, m.shape[:-2], count, self.numbers(m, stored), stored)


def identity(order: int, dtype: Any) -> jax.Array:
    """Made by the program: XLA would take minutes to encode a constant while it compiles."""
    return jax.lax.optimization_barrier(jnp.eye(order, dtype=dtype))


def each_of(batch: tuple[int, ...], stored: Any) -> Any:
    """The stored form of one matrix, for every matrix of a batch.

    Encoding them all would take the memory of decoded matrices, and longer programs.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), stored)
