"""Refresh policies: when a factor is looked at, and whether its root is then computed anew.

A policy is a value, not a function (`optax.inject_hyperparams` takes callables for schedules). It
has

* `schedule`, an `Every`: the steps at which factors are due;
* `keeps_eigenpairs`: whether the factor's last eigenvectors and eigenvalues are kept for it;
* `examine(check) -> Verdict`, asked of every due factor if `keeps_eigenpairs`: refresh, or go on
with
  the old eigenvectors, which eigenvalues, and how much damping.

`every(k)` refreshes whatever is due. Writing another policy means writing a frozen dataclass with
these three (see `_foam.py` for one); the preconditioner does the rest: it decomposes only what
a verdict asks for, builds the root `Q (d + damping)^(-1/p) Qᵀ`, counts, and rejects what is not
finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from .._validate import check_bool, check_positive_int


class Check(NamedTuple):
    """What a policy sees of one factor at a check."""

    statistic: jax.Array  # L now, (d, d)
    eigenvectors: jax.Array  # Q of the last refresh, (d, d)
    eigenvalues: jax.Array  # its eigenvalues, not damped, (d,)
    damping: jax.Array  # ε in use
    base_damping: Any  # ε0
    root: int  # p
    first: jax.Array  # whether the factor has never been refreshed


class Verdict(NamedTuple):
    """What a policy says of one factor; without a refresh the last two take effect."""

    refresh: jax.Array  # whether to decompose the statistic anew, with the base damping
    proxy: jax.Array  # the number on which that was decided, for the record
    damping: Any  # ε to use without a refresh
    eigenvalues: jax.Array  # eigenvalues to use without a refresh


@dataclasses.dataclass(frozen=True)
class Every:
    """See `every`."""

    period: int
    offset: int = 0
    first: bool = True
    stagger: bool = False

    keeps_eigenpairs = False

    @property
    def schedule(self) -> Every:
        """The steps at which everything is refreshed: this policy itself."""
        return self

    def phase(self, count: jax.Array) -> jax.Array:
        """Steps since the last due one, `0 … period - 1`."""
        return (count - self.offset) % self.period

    def due(self, count: jax.Array) -> jax.Array:
        """Whether step `count` (from 1) is due, without regard to staggering."""
        due = self.phase(count) == 0
        return due | (count == 1) if self.first else due

    def examine(self, check: Check) -> Verdict:
        """Refreshes; not asked, since `keeps_eigenpairs` is False."""
        return Verdict(check.first | True, check.damping, check.base_damping, check.eigenvalues)


@runtime_checkable
class RefreshPolicy(Protocol):
    """What `refresh=` takes; see the module."""

    @property
    def schedule(self) -> Every:
        """The steps at which factors are due."""
        ...

    @property
    def keeps_eigenpairs(self) -> bool:
        """Whether `examine` is asked, and eigenpairs are kept for it."""
        ...

    def examine(self, check: Check) -> Verdict:
        """Decides on one due factor."""
        ...


def every(k: int, *, offset: int = 0, first: bool = True, stagger: bool = False) -> Every:
    """Refreshes at every step `t` with `t mod k = offset mod k`.

    Args:
      k: period in steps.
      offset: place within the period; 1 makes it steps 1, k + 1, 2k + 1, …
      first: whether step 1 refreshes in any case.
      stagger: spread the refreshes of the factors over the period, balanced by cost, so that no
        step takes much longer than others. Each factor still has period k. With `first`, all are
        refreshed at step 1 as well.

    Raises:
      ValueError: if `k` is not a positive integer or `offset` not an integer.

    Example:
      >>> import curvax
      >>> policy = curvax.every(3, offset=1)
      >>> [t for t in range(1, 9) if policy.due(t)]
      [1, 4, 7]
    """
    check_positive_int("k", k)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(f"offset must be an integer, got {offset!r}.")
    check_bool("first", first)
    check_bool("stagger", stagger)
    return Every(k, offset, first, stagger)


_FOR_SUBSPACES = " This policy is for subspaces: a factor has no projected gradient."


def check_refresh(refresh: Any) -> None:
    """Requires a refresh policy.

    Raises:
      ValueError: if `refresh` is something else.
    """
    if not isinstance(refresh, RefreshPolicy) or callable(refresh):
        raise ValueError(
            f"refresh must be a policy such as curvax.every(10), got {refresh!r}."
            + _FOR_SUBSPACES * hasattr(refresh, "renews")
        )


Refresh = int | RefreshPolicy


def as_policy(refresh: Any, *, offset: int, first: bool) -> RefreshPolicy:
    """`refresh` as a policy; an integer is a period, with the method's own offset and start.

    Raises:
      ValueError: if `refresh` is neither a positive integer nor a policy.
    """
    if isinstance(refresh, RefreshPolicy) and not callable(refresh):
        return refresh
    if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
        raise ValueError(
            "refresh must be a period of at least 1 step or a policy such as curvax.every(10), "
            f"got {refresh!r}."
            + " optax.inject_hyperparams needs it in static_args." * hasattr(refresh, "dtype")
            + _FOR_SUBSPACES * hasattr(refresh, "renews")
        )
    return every(refresh, offset=offset, first=first)
