"""Refreshing only the matrices that are due, in loops over them (`_visits.py`).

With `stagger` the matrices of all batches are distributed over the steps of the period, the most
expensive first, each to the step with the least work so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._recording import record
from ._policy import Every
from ._visits import traced_once, visit_due


class Staggered(NamedTuple):
    """Recorded where the step of a matrix's refresh depends on which matrices are beside it."""

    period: int


def refresh_due(
    refresh_one: Callable[[Any], Any],
    like: Any,
    entries: Any,
    costs: Any,
    schedule: Every,
    count: jax.Array,
    select: Callable[[Any, jax.Array], jax.Array] | None = None,
    numbers: Any = None,
) -> Any:
    """Applies `refresh_one` to the entry of each matrix that is due.

    Args:
      refresh_one: maps the entry of one matrix (a pytree without batch axes) to its new entry, of
        the same structure, shapes and dtypes.
      like: a tree of matrices `(..., m, n)`; the leading axes are the batch.
      entries: per leaf of `like` a pytree of arrays with the batch axes first, or None if the leaf
        needs no refresh.
      costs: per leaf of `like` the cost of refreshing one matrix, in any unit.
      schedule: the steps at which matrices are due.
      count: the step, from 1.
      select: given a batch's entry and the mask of its matrices that the schedule makes due, bool
        (size,), returns the mask of the matrices to refresh. Without it, these are the same.
      numbers: per leaf of `like` how many numbers the largest array has that `refresh_one` makes,
        for GPUs to refresh several matrices at once; `None` if they go one by one there too.
    """
    visit = traced_once(refresh_one)
    leaves, treedef = jax.tree.flatten(like)
    results = treedef.flatten_up_to(entries)
    prices = treedef.flatten_up_to(costs)
    largest = [None] * len(leaves) if numbers is None else treedef.flatten_up_to(numbers)
    places = [i for i, entry in enumerate(results) if entry is not None]
    shapes = [leaves[i].shape[:-2] for i in places]
    sizes = [math.prod(shape) for shape in shapes]
    phases: Sequence[np.ndarray | None] = [None] * len(places)
    if schedule.stagger:
        record(Staggered(schedule.period))
        phases = _deal(sizes, [prices[i] for i in places], schedule.period)
    for i, shape, size, own in zip(places, shapes, sizes, phases, strict=True):
        due = _scheduled(schedule, count, own)
        if select is not None:
            due = select(results[i], jnp.broadcast_to(due, size))
        results[i] = visit_due(visit, results[i], shape, due, largest[i])
    return treedef.unflatten(results)


def untried(state: Any) -> jax.Array:
    """Matrices whose refreshes were all rejected so far: they are tried again at every step."""
    return (state.refreshes == 0) & (state.rejected > 0)


def _scheduled(schedule: Every, count: jax.Array, phases: np.ndarray | None) -> jax.Array:
    """Whether a batch is due at step `count`; if staggered, which of its matrices, bool (size,)."""
    if phases is None:
        return schedule.due(count)
    due = schedule.phase(count) == phases
    return due | (count == 1) if schedule.first else due


def _deal(sizes: Sequence[int], costs: Sequence[float], period: int) -> list[np.ndarray]:
    """Per batch the phase of the period at which each entry is due, int (size,)."""
    load = [0.0] * period
    phases = [np.zeros(size, np.int32) for size in sizes]
    for i in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        for entry in range(sizes[i]):
            phases[i][entry] = min(range(period), key=load.__getitem__)
            load[phases[i][entry]] += costs[i]
    return phases
