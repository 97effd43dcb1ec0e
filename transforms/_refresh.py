"""Refresh policies: at which steps the costly part of a preconditioner is computed anew.

A policy is a value, not a function (`optax.inject_hyperparams` takes callables for schedules).
Steps count from 1. Work that is not due is not done: policies answer with one scalar, around which
the transformations put one `jax.lax.cond`.
"""

from __future__ import annotations

import dataclasses

import jax

from ._validate import check_positive_int


@dataclasses.dataclass(frozen=True)
class Every:
    """See `every`."""

    period: int
    offset: int
    first: bool

    def due(self, count: jax.Array) -> jax.Array:
        """Whether step `count` (from 1) refreshes."""
        due = count % self.period == self.offset % self.period
        return due | (count == 1) if self.first else due


def every(k: int, *, offset: int = 0, first: bool = True) -> Every:
    """Refreshes at every step `t` with `t mod k = offset mod k`.

    Args:
      k: period in steps.
      offset: place within the period; 1 makes it steps 1, k + 1, 2k + 1, …
      first: whether step 1 refreshes in any case.

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
    return Every(k, offset, first)


Refresh = int | Every


def as_policy(refresh: Refresh, *, offset: int, first: bool) -> Every:
    """`refresh` as a policy; an integer is a period, with the method's own offset and start.

    Raises:
      ValueError: if `refresh` is neither a positive integer nor a policy.
    """
    if isinstance(refresh, Every):
        return refresh
    if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
        raise ValueError(
            f"refresh must be a period of at least 1 step or a policy such as curvax.every(10), "
            f"got {refresh!r}."
        )
    return every(refresh, offset=offset, first=first)
