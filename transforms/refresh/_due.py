"""Refreshing only the matrices that are due, in loops over them (`linalg/_loops.py`).

With `stagger` the matrices of all arrays of the plan (`_stacks.py`) are distributed over the steps
of the period, the most expensive first, each to the step with the least work so far of its device.
The state keeps the step of each matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._stacks import plan_for
from ..linalg._loops import visit_due
from ._policy import Every


def refresh_due(
    visit: Callable[[Any, Any], Any],
    entry: Any,
    batch: tuple[int, ...],
    schedule: Every,
    count: jax.Array,
    *,
    given: Any = (),
    phase: jax.Array | None = None,
    select: Callable[[Any, Any, jax.Array], jax.Array] | None = None,
    numbers: int | None = None,
) -> Any:
    """Refreshes the matrices of a batch that are due.

    Args:
      visit: maps the entry of one matrix (a pytree without batch axes) and what is given for it to
        its new entry, of the same structure, shapes and dtypes.
      entry: a pytree of arrays with the batch axes first.
      batch: these axes.
      schedule: the steps at which matrices are due.
      count: the step, from 1.
      given: a pytree of arrays with the batch axes first that `visit` only reads.
      phase: what `phases_of` gave in `init`.
      select: from the entry, what is given for it, and the mask of the matrices that the schedule
        makes due, bool (size,), the mask of the matrices to refresh. Without it, these are the
        same.
      numbers: how many numbers the largest array has that `visit` makes, for GPUs to refresh
        several matrices at once; `None` if they go one by one there too.
    """
    due = schedule.due(count)
    if phase is not None:
        own = schedule.phase(count) == phase.reshape(-1)
        due = own | (count == 1) if schedule.first else own
    if select is not None:
        due = select(entry, given, jnp.broadcast_to(due, math.prod(batch)))
    return visit_due(visit, entry, batch, due, numbers, given)


def phases_of(
    x: Any, schedule: Every, costs: Sequence[Callable[[Any], float | None]]
) -> list[jax.Array | None]:
    """When the matrices of `x (..., m, n)` are due: steps of the period, int32 `(...)`.

    Args:
      x: the array at work, in the plan of all arrays.
      schedule: the steps at which matrices are due.
      costs: each maps an array of the plan to the cost of refreshing one of its matrices, in any
        unit; `None` if they are never refreshed.

    Returns:
      For each of `costs` the phases; `None` where nothing is staggered or refreshed.
    """
    if not schedule.stagger:
        return [None] * len(costs)
    plan = plan_for(x)
    works = [
        (number, key, price, own.devices)
        for number, cost in enumerate(costs)
        for key, own in plan.arrays.items()
        if (price := cost(own.like)) is not None
    ]
    dealt = _deal([(price, devices) for *_, price, devices in works], schedule.period)
    found = {
        number: jnp.asarray(phases.reshape(x.shape[:-2]))
        for (number, key, *_), phases in zip(works, dealt, strict=True)
        if key == plan.key
    }
    return [found.get(number) for number in range(len(costs))]


def untried(state: Any) -> jax.Array:
    """Matrices whose refreshes were all rejected so far: they are tried again at every step."""
    return (state.refreshes == 0) & (state.rejected > 0)


def _deal(works: Sequence[tuple[float, np.ndarray]], period: int) -> list[np.ndarray]:
    """The phase of the period at which each matrix is due, from its cost and its device."""
    load = np.zeros((1 + max((max(own, default=0) for _, own in works), default=0), period))
    phases = [np.zeros(len(devices), np.int32) for _, devices in works]
    for i in sorted(range(len(works)), key=lambda i: -works[i][0]):
        price, devices = works[i]
        for entry, device in enumerate(devices):
            phases[i][entry] = phase = np.argmin(load[device])
            load[device, phase] += price
    return phases
