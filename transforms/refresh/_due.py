"""Refreshing only the matrices that are due, in loops over them (`linalg/_loops.py`).

With `stagger` the matrices of all arrays of the plan (`_stacks.py`) are distributed over the steps
of the period, in the groups that GPUs refresh at once, the most expensive first, each to the step
with the least work so far of its device. The state keeps the step of each matrix.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._stacks import plan_for
from ..linalg import _loops
from ..linalg._loops import visit_due
from ._policy import Every


class Refreshing(NamedTuple):
    """What it takes to refresh one matrix."""

    cost: float  # in any unit
    # How many numbers the largest array has that is made, for GPUs to refresh several matrices at
    # once; `None` if they go one by one there too.
    numbers: int | None


def refresh_due(
    visit: Callable[[Any, Any], Any],
    entry: Any,
    batch: tuple[int, ...],
    schedule: Every,
    count: jax.Array,
    state: Any,
    *,
    inputs: Any = (),
    asked: Any = True,
    among: Any = True,
    numbers: int | None = None,
    rotates: bool = False,
) -> Any:
    """Refreshes the matrices of a batch that are due, in the loops of `visit_due`.

    `entry` and `inputs` are pytrees of arrays with the axes `batch` first, `count` is the step,
    from 1, and `numbers` that of a `Refreshing`. `state` counts the refreshes and has the phases of
    `phases_of`: what was always rejected so far, such as a statistic of zeros, is tried again at
    every step. `asked`, bool or bool (size,), says whether what is due is refreshed, and `among`,
    alike, which matrices may be refreshed at all. `rotates`: GPUs decompose nothing.
    """
    size, phase = math.prod(batch), state.phase
    due = schedule.due(count) if phase is None else schedule.due(count, phase.reshape(-1))
    due = (jnp.broadcast_to(due, size) & asked | untried(state).reshape(-1)) & among
    groups = _loops.ROTATED if rotates and not schedule.stagger else _loops.REFRESHED
    group = groups.size(size, numbers, schedule.together)
    return visit_due(visit, entry, batch, due, group, inputs)


def phases_of(
    x: Any, schedule: Every, refreshings: Sequence[Callable[[Any], Refreshing | None]]
) -> list[jax.Array | None]:
    """When the matrices of `x (..., m, n)` are due: steps of the period, int32 `(...)`.

    They are for each of `refreshings`, which maps an array of the plan to what it takes to refresh
    one of its matrices, or `None` if they never are. `None` if nothing is staggered.
    """
    if not schedule.stagger:
        return [None] * len(refreshings)
    plan = plan_for(x)
    works = [
        (number, key, work, array.devices)
        for number, refreshing in enumerate(refreshings)
        for key, array in plan.arrays.items()
        if (work := refreshing(array.like)) is not None
    ]
    dealt = _deal([(work, devices) for *_, work, devices in works], schedule)
    phases_by_number = {
        number: jnp.asarray(phases.reshape(x.shape[:-2]))
        for (number, key, *_), phases in zip(works, dealt, strict=True)
        if key == plan.key
    }
    return [phases_by_number.get(number) for number in range(len(refreshings))]


def untried(state: Any) -> jax.Array:
    """Matrices whose refreshes were all rejected so far: every step tries them again."""
    return (state.refreshes == 0) & (state.rejected > 0)


def _deal(works: Sequence[tuple[Refreshing, np.ndarray]], schedule: Every) -> list[np.ndarray]:
    """The phase of each matrix; devices have equal shares of each array, and some of the rest."""
    number = 1 + max((max(owners, default=0) for _, owners in works), default=0)
    load = np.zeros((number, schedule.period))
    phases = [np.zeros(len(owners), np.int32) for _, owners in works]
    groups = []
    for i, (work, owners) in enumerate(works):
        share = len(owners) // number
        size = _loops.REFRESHED.size(share, work.numbers, schedule.together)
        even = share * number
        starts = [*range(0, even, size), *range(even, len(owners))]
        groups += [(i, j, min(size, max(1, even - j))) for j in starts]
    for i, start, size in sorted(groups, key=lambda group: -works[group[0]][0].cost * group[2]):
        work, owners = works[i]
        device = owners[start]
        phases[i][start : start + size] = phase = np.argmin(load[device])
        load[device, phase] += work.cost * size
    return phases
