r"""Both sides of matrices: their state, its accumulation, and the plot of a refresh.

A side has a statistic $L$ and what is made of it: a basis, beside $H = U^\top L U$ in the place of
$L$ (`_bases.py`), or a stored inverse root (`_roots.py`). A refresh is the same for both
(`SideRule.checked`), of one matrix and side: decode the statistic, start what is damaged anew
(`restarted`), ask the policy, turn the basis (`linalg/_turns.py`) or solve for the root, keep the
last one if the new one is not finite (`rejected`), count. Moments in the basis turn along. A
statistic of zeros makes nothing, and is tried again at every step until the side's first refresh.
`refresh/_due.py` says when, `refresh/_methods.py` by which method.

*Numerics.* Statistics, bases and roots in float32 at least. *Cost* for order `d` beside `k`: `2d²k`
FLOPs for the statistic at each step, `4d²k` into a basis and back, `2d²k` for a stored root;
`O(d³)` at a refresh.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._carry import Moments
from .._counts import counter, counters
from .._recording import Meaning, is_repeated, record
from .._side import Side
from .._trees import where_entries
from ..linalg._loops import visit_all
from ..linalg._numerics import magnitude
from ..linalg._platforms import diagonals, identity
from ..linalg._products import Products, at, gram
from ..refresh._due import Refreshing, phases_of, refresh_due
from ..refresh._policy import RefreshPolicy, Verdict
from ..storage._storage import Storage, StorageRecord


@counters
class FactorCounts(NamedTuple):
    """The counters of a `Factor`."""

    value: Any
    names = ("checks", "refreshes", "indefinite", "rejected", "restarted")


class Factor(NamedTuple):
    """One side of a batch of matrices; its order `d` is `m` or `n`."""

    statistic: Any  # H = Uᵀ L U, or L itself beside a stored root, (..., d, d) in stored form
    basis: Any  # U in use, (..., d, d) in stored form; None beside a stored root
    inverse_root: Any  # in use, (..., d, d) in stored form; None beside a basis
    eigenvalues: jax.Array | None  # diag(H) of the last refresh, (..., d), of roots or if examined
    spectrum: jax.Array | None  # λ, running averages (..., d), of whitened gradients in bases
    damping: jax.Array | None  # ε in use, (...), if a policy examines roots
    proxy: jax.Array | None  # the policy's last figure, such as FOAM's h, float32 (...)
    error: jax.Array | None  # the estimated error of a stored root, float32 (...)
    counts: FactorCounts
    phase: jax.Array | None = None  # when it is due, int32 (...), if staggered

    checks = counter("checks")  # times the side was due, int32 (...)
    refreshes = counter("refreshes")  # bases turned, or roots recomputed
    indefinite = counter("indefinite")  # stored roots whose statistic had a negative eigenvalue
    rejected = counter("rejected")  # checks that found nothing finite, or all-zero statistics
    restarted = counter("restarted")  # statistics, bases or eigenvalues that started anew


Pair = tuple[Factor | None, Factor | None]
"""The left and the right side of matrices; `None` for a side without a factor."""


def each_side(f: Callable[..., Any], factors: Pair, *others: Sequence[Any]) -> tuple[Any, Any]:
    """`f(side, factor, …)`, with the entries of `others`, for the sides that have a factor."""
    rows = zip(Side, factors, *others, strict=True)
    left, right = (None if row[1] is None else f(*row) for row in rows)
    return left, right


class Renewed(NamedTuple):
    """A refresh of one side of a matrix."""

    factor: Factor
    moments: Moments
    good: jax.Array  # bool: whether the new statistic, or root, is finite
    indefinite: jax.Array  # bool: whether the statistic had a negative eigenvalue


@dataclasses.dataclass(frozen=True)
class SideRule(abc.ABC):
    """The settings of both sides."""

    storage: Storage  # of bases and roots
    products: Products
    policy: RefreshPolicy
    method: Any  # how a refresh renews a basis or a root
    b2: Any  # decay rate of the statistics; None sums
    initial: Any  # a statistic starts as initial · I

    @property
    @abc.abstractmethod
    def statistics(self) -> Any:
        """What encodes and decodes statistics."""

    @abc.abstractmethod
    def first_fields(self, batch: tuple[int, ...], eye: jax.Array) -> dict[str, Any]:
        """A first `Factor` beside its statistic and counters, with stored forms of one matrix."""

    @abc.abstractmethod
    def renewed(self, factor: Factor, h: jax.Array, moments: Moments, side: Side) -> Renewed:
        """A refresh of one side of a single matrix, for its decoded statistic `h (d, d)`."""

    def with_sound_basis(self, factor: Factor) -> tuple[Factor, jax.Array]:
        """A factor whose damaged basis starts anew, and whether it was sound."""
        return factor, jnp.bool_(True)

    def verdict(self, factor: Factor, h: jax.Array) -> Verdict:
        """The policy's verdict on a finite statistic; without a policy, what is due is renewed."""
        return Verdict(jnp.bool_(True))

    def largest(self, side: Side, x: Any) -> int:
        """The rows, or columns, of the largest array that a refresh makes."""
        return side.order(x)

    def started(self, x: Any, sides: Callable[[Any], Sequence[Side]]) -> Pair:
        """The initial states of `x (..., m, n)`, for the sides that `sides(x)` names."""
        batch, dtype = x.shape[:-2], np.promote_types(x.dtype, np.float32)
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

        def started(side: Side, phase: jax.Array | None) -> Factor | None:
            if side not in sides(x):
                return None
            eye = identity(side.order(x), dtype)
            fields = dict.fromkeys(Factor._fields) | self.first_fields(batch, eye)
            fields["statistic"] = self.statistics.encode_factor(self.initial * eye, None)
            # Encoding them all would take the memory of decoded matrices, and longer programs.
            for name in ("statistic", "basis", "inverse_root"):
                fields[name] = jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), fields[name]
                )
            fields |= {"counts": FactorCounts.zeros(batch), "phase": phase}
            return Factor(**fields)  # pyright: ignore

        works = [functools.partial(refreshing, side) for side in Side]
        left, right = map(started, Side, phases_of(x, self.policy.schedule, works))
        return left, right

    def numbers(self, x: jax.Array, sides: Sequence[Side]) -> int | None:
        """How many numbers the largest array has that `visit_all` makes of a matrix.

        It is `None` if what these sides of `x (..., m, n)` store is not decoded one at a time.
        """
        orders = [side.order(x) for side in sides]
        if not any(map(self.storage.decodes_singly, orders)):
            return None
        return max(math.prod(x.shape[-2:]), *(order * order for order in orders))

    def two_sided(
        self,
        product: Callable[[Any, jax.Array, Side], jax.Array],
        x: jax.Array,
        stored: Sequence[Any],
        count: jax.Array,
    ) -> jax.Array:
        """`product(form, x, side)` for the stored form of each side, in the dtype of `x`."""

        def visit(x: jax.Array, stored: Sequence[Any]) -> jax.Array:
            y = x
            for side, form in zip(Side, stored, strict=True):
                y = y if form is None else product(form, y, side)
            return y.astype(x.dtype)

        sides = [side for side, form in zip(Side, stored, strict=True) if form is not None]
        return visit_all(visit, x, x.shape[:-2], count, self.numbers(x, sides), stored)

    def accumulated(
        self, factors: Pair, sources: Sequence[jax.Array], count: jax.Array, start: Any = None
    ) -> Pair:
        """Both sides after accumulating `s sᵀ`, or `sᵀ s` on the right, for its `s (..., m, n)`.

        A statistic of zeros starts at the multiple `start (...)` of the identity.
        """

        def accumulate(side: Side, stored: Any, source: tuple[jax.Array, Any]) -> Any:
            s, start = source
            old = self.statistics.decode_factor(stored)
            if start is not None:
                empty = ~jnp.any(diagonals(old)[..., None, :] != 0, axis=(-2, -1))[..., None, None]
                eye = jnp.broadcast_to(jnp.eye(side.order(s), dtype=old.dtype), old.shape)
                old = jnp.where(empty, start[..., None, None] * eye, old)
            square = gram(s.astype(old.dtype), side, self.products.statistics or self.method.level)
            pairs = [[diagonals(x)[..., None, :] for x in (old, square)], (old, square)]
            if self.b2 is None:  # ASGO's Algorithm 1, line 6
                diagonal, new = (a + b for a, b in pairs)
            else:  # Shampoo, lines 4-5; ASGO, lines 8, 10; SOAP: L, R
                diagonal, new = (self.b2 * a + (1 - self.b2) * b for a, b in pairs)
            # A running average would keep a NaN forever, so the old statistic stays if the new one
            # is not finite. The diagonal decides: it holds the largest entry of a Gram matrix.
            good = jnp.isfinite(diagonal).all(axis=(-2, -1))
            if start is not None:  # of whitened gradients, see `_whitened.py`
                good &= jnp.any(s != 0, axis=(-2, -1))
            kept = jnp.where(good[..., None, None], new, old)
            return where_entries(good, self.statistics.encode_factor(kept, stored), stored)

        def averaged(side: Side, factor: Factor, s: jax.Array) -> Factor:
            visit, numbers = functools.partial(accumulate, side), self.numbers(s, [side])
            new = visit_all(visit, factor.statistic, s.shape[:-2], count, numbers, (s, start))
            return factor._replace(statistic=new)

        return each_side(averaged, factors, sources)

    def refreshing(self, side: Side, x: Any, *, rotates: bool = False) -> Refreshing:
        """What it takes to refresh one side of a matrix of `x (..., m, n)`."""
        order = side.order(x)
        numbers = max(order**2, math.prod(x.shape[-2:])) if rotates else self.largest(side, x) ** 2
        # A policy that examines matrices refreshes few: at once they would all be refreshed.
        alone = self.policy.examines is not None or self.storage.decodes_singly(order)
        return Refreshing(float(order) ** 3, None if alone else numbers)

    def refreshed(
        self, g: jax.Array, factors: Pair, moments: Moments, count: jax.Array
    ) -> tuple[Pair, Moments]:
        """Both sides after the refreshes due at this step, and the moments with them.

        `count` is the step, from 1 after a warm-up if there is one.
        """
        renewed = [*factors]
        for i, (side, factor) in enumerate(zip(Side, factors, strict=True)):
            if factor is None:
                continue
            entry = factor._replace(phase=None), moments
            for method, among in self.method.rounds(factor):
                rule = dataclasses.replace(self, method=method)
                # jax.jit hashes its function. A bound method hashes its rule, which may hold
                # tracers; a partial function does not.
                visit = jax.jit(functools.partial(rule.checked, side=side))
                with at(self.products.refresh or self.method.level):
                    entry = refresh_due(
                        visit,
                        entry,
                        g.shape[:-2],
                        self.policy.schedule,
                        count,
                        factor,
                        asked=count > 0,
                        among=among,
                        numbers=self.refreshing(side, g, rotates=method.rotates).numbers,
                        rotates=method.rotates,
                    )
            refreshed, moments = entry
            renewed[i] = refreshed._replace(phase=factor.phase)
        return (renewed[0], renewed[1]), moments

    def checked(self, entry: tuple[Factor, Moments], _: Any, side: Side) -> tuple[Factor, Moments]:
        """Refreshes one side of a single matrix, if the policy asks for it; moments follow."""
        factor, moments = entry
        stored, h = factor.statistic, self.statistics.decode_factor(factor.statistic)
        size = magnitude(h)
        factor, sound = self.with_sound_basis(factor)
        sound &= jnp.isfinite(size)
        anew = self.statistics.encode_factor(
            # On the mesh of the statistic.
            jnp.zeros_like(h) + self.initial * identity(len(h), h.dtype),
            None,
        )
        factor = factor._replace(statistic=_where(sound, stored, anew))
        verdict = self.verdict(factor, jnp.where(sound, h, 0))  # FOAM, lines 8-11

        # All-zero statistics make no root, which would consist of damping alone, and no basis.
        new = jax.lax.cond(
            verdict.refresh & sound & (size > 0),
            lambda: self.renewed(factor, h, moments, side),
            lambda: Renewed(factor, moments, jnp.bool_(False), jnp.bool_(False)),
        )
        renewed, moments = _where(new.good, (new.factor, new.moments), (factor, moments))
        if verdict.eigenvalues is not None:  # without a refresh: FOAM, lines 13-15
            own = renewed.eigenvalues, renewed.damping
            adapted = jax.tree.map(
                lambda x, y: x.astype(y.dtype), (verdict.eigenvalues, verdict.damping), own
            )
            d, damping = _where(verdict.refresh | ~sound, own, adapted)
            proxy = _where(sound, verdict.proxy, factor.proxy)
            renewed = renewed._replace(eigenvalues=d, damping=damping, proxy=proxy)
        counts = factor.counts.plus(
            checks=1,
            refreshes=new.good,
            indefinite=new.good & new.indefinite,
            rejected=(verdict.refresh | ~sound) & ~new.good,
            restarted=~sound,
        )
        return renewed._replace(counts=counts), moments


def _where(condition: jax.Array, a: Any, b: Any) -> Any:
    """`jnp.where` for trees of a single matrix, in the dtypes of `b`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y).astype(y.dtype), a, b)
