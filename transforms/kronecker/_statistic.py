r"""Both sides of matrices: running second moments of gradients, and their refreshes."""

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
from ..directions._carry import Moments
from ..linalg._loops import visit_all
from ..linalg._platforms import diagonals
from ..linalg._products import Products, at, gram
from ..refresh._due import Refreshing, phases_of, refresh_due, untried
from ..refresh._policy import RefreshPolicy
from ..storage._storage import Storage, StorageRecord

SIDES = ("both", "left", "right", "smaller")

Pair = tuple[Any, Any]
"""The `Factor` or the `Basis` of the left and of the right side; `None` for a side without one."""


@dataclasses.dataclass(frozen=True)
class SideRule(abc.ABC):
    """The settings of both sides, each of which has a `Factor` or a `Basis`."""

    storage: Storage  # of roots and bases
    statistics: Any  # what stores statistics: the same storage, or `Graded` of it
    products: Products
    policy: RefreshPolicy
    method: Any  # a `BasisMethod`, or the name of a solver
    b2: Any  # decay rate of the statistics; None sums
    initial: Any  # a statistic starts as initial · I
    whiten: bool  # whether statistics are those of whitened gradients

    in_bases = False  # whether statistics are kept in their bases
    carries = False  # whether moments turn with the bases

    @abc.abstractmethod
    def start(self, batch: tuple[int, ...], order: int, dtype: Any, phase: jax.Array | None) -> Any:
        """The initial `Factor` or `Basis` of a batch of matrices."""

    @abc.abstractmethod
    def refresh_one(
        self, entry: tuple[Any, Moments], given: None, side: Side | None
    ) -> tuple[Any, Moments]:
        """Checks one side of a single matrix; returns it, and the matrix's moments."""

    def started(self, x: Any, sides: Callable[[Any], Sequence[Side]]) -> Pair:
        """The initial states of `x (..., m, n)`, for the sides that `sides(x)` names.

        Raises:
          ValueError: if products have levels and the dtype is not float32.
        """
        dtype = np.promote_types(x.dtype, np.float32)
        if not is_repeated():
            if dtype != jnp.float32 and self.products != Products():
                raise ValueError(
                    f"products must be None for parameters of {dtype}, whose products are in full "
                    f"precision; got {self.products!r}."
                )
            for order in (side.order(x) for side in sides(x)):
                form = self.storage.describe(order)
                record(StorageRecord(order, form))
                record(Meaning(f"order {order}: {form}"))
                record(Meaning(f"refresh policy: {type(self.policy).__name__}"))

        def refreshing(side: Side, x: Any) -> Refreshing | None:
            return self.refreshing(side, x) if side in sides(x) else None

        works = [functools.partial(refreshing, side) for side in Side]
        left, right = (
            self.start(x.shape[:-2], side.order(x), dtype, phase) if side in sides(x) else None
            for side, phase in zip(Side, phases_of(x, self.policy.schedule, works), strict=True)
        )
        return left, right

    def numbers(self, x: jax.Array, stored: Sequence[Any]) -> int | None:
        """How many numbers a matrix's largest array has, for `visit_all`.

        It is `None` if no side of `x (..., m, n)` with a `stored` form is decoded one at a time.
        """
        pairs = zip(x.shape[-2:], stored, strict=True)
        orders = [order for order, own in pairs if own is not None]
        if not any(map(self.storage.decodes_singly, orders)):
            return None
        return max(math.prod(x.shape[-2:]), *(order * order for order in orders))

    def two_sided(
        self,
        product: Callable[[Any, jax.Array, Side], jax.Array],
        m: jax.Array,
        stored: Sequence[Any],
        count: jax.Array,
    ) -> jax.Array:
        """`product(own, m, side)` for the stored form of each side, in the dtype of `m`."""

        def visit(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            for side, own in zip(Side, stored, strict=True):
                x = x if own is None else product(own, x, side)
            return x.astype(m.dtype)

        return visit_all(visit, m, m.shape[:-2], count, self.numbers(m, stored), stored)

    def accumulated(
        self, owners: Pair, sources: Sequence[jax.Array], count: jax.Array, start: Any = None
    ) -> Pair:
        """Both sides after accumulating `s sᵀ`, or `sᵀ s` on the right, for `s (..., m, n)`.

        Args:
          owners: the states of the sides.
          sources: an `s` for each side.
          count: the step, from 1.
          start: a statistic of zeros starts at this multiple `(...)` of the identity.
        """

        def accumulate(side: Side, stored: Any, given: tuple[jax.Array, Any]) -> Any:
            s, start = given
            old = self.statistics.decode_factor(stored)
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
            kept = jnp.where(finite[..., None, None], new, old)
            return where_entries(finite, self.statistics.encode_factor(kept, stored), stored)

        found = [*owners]
        for i, (side, owner, s) in enumerate(zip(Side, owners, sources, strict=True)):
            if owner is not None:
                visit = functools.partial(accumulate, side)
                numbers = self.numbers(s, [owner if own is side else None for own in Side])
                new = visit_all(visit, owner.statistic, s.shape[:-2], count, numbers, (s, start))
                found[i] = owner._replace(statistic=new)
        return found[0], found[1]

    def kept_statistic(self, sound: jax.Array, stored: Any, statistic: jax.Array) -> Any:
        """A stored statistic, or the initial one like `statistic (d, d)` if it is not `sound`."""
        eye = identity(len(statistic), statistic.dtype)
        first = jnp.zeros_like(statistic) + self.initial * eye  # on the mesh of the statistic
        anew = self.statistics.encode_factor(first, None)
        return jax.tree.map(lambda old, new: jnp.where(sound, old, new), stored, anew)

    def refreshing(self, side: Side, x: Any) -> Refreshing:
        """What it takes to refresh one side of a matrix of `x (..., m, n)`."""
        order = side.order(x)
        # A policy that examines matrices refreshes few: at once they would all be refreshed.
        alone = self.policy.examines is not None or self.storage.decodes_singly(order)
        largest = max(x.shape[-2:]) if self.carries else order
        return Refreshing(float(order) ** 3, None if alone else largest**2)

    def visits(self) -> list[tuple[Callable[..., Any], bool | None]]:
        """What refreshes a matrix, and when: first (`True`), later (`False`) or always (`None`)."""
        return [(self.refresh_one, None)]

    def refreshed(
        self, g: jax.Array, owners: Pair, moments: Moments, count: jax.Array
    ) -> tuple[Pair, Moments]:
        """Both sides after the refreshes due at this step, and the moments with them.

        `count` is counted from the end of the warm-up. Until it is 1, only roots whose refreshes
        were all rejected are tried again; later, these are tried at every step.
        """
        # Traced once for both sides of square matrices, unless moments follow. A rule that holds
        # tracers has no hash, and so its methods have none; a partial function has.
        visits = [
            (jax.jit(functools.partial(visit), static_argnames="side"), first)
            for visit, first in self.visits()
        ]
        found = [*owners]
        for i, (side, owner) in enumerate(zip(Side, owners, strict=True)):
            if owner is None:
                continue

            def chosen(first: bool | None, due: jax.Array, owner: Any = owner) -> jax.Array:
                never = owner.refreshes.reshape(-1) == 0
                if not self.carries:
                    due = due & (count > 0) | untried(owner).reshape(-1)
                return due if first is None else due & (never if first else ~never)

            entry = owner._replace(phase=None), moments
            for visit, first in visits:
                every = self.carries and first is None
                alone = self.carries and first
                with at(self.products.refresh):
                    entry = refresh_due(
                        functools.partial(visit, side=side if self.carries else None),
                        entry,
                        g.shape[:-2],
                        self.policy.schedule,
                        count,
                        phase=owner.phase,
                        select=None if every else functools.partial(chosen, first),
                        numbers=None if alone else self.refreshing(side, g).numbers,
                    )
            refreshed, moments = entry
            found[i] = refreshed._replace(phase=owner.phase)
        return (found[0], found[1]), moments


def identity(order: int, dtype: Any) -> jax.Array:
    """Made by the program: XLA would take minutes to encode a constant while it compiles."""
    return jax.lax.optimization_barrier(jnp.eye(order, dtype=dtype))
