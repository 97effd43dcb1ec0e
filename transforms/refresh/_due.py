"""Computing only what is due: a loop over the due matrices of many batches.

`lax.cond` under `vmap` computes both branches, and a `cond` for each matrix copies what it does not
change. Here every batch has one loop whose number of rounds is the number of its due matrices, zero
at most steps; each round takes one matrix out, works on it, and writes it back in place.
Temporaries are those of one matrix, whatever the size of the batch.

With `stagger` the matrices of all batches are dealt out to the steps of the period, the costliest
first, each to the step with the least work so far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._policy import Every


def refresh_due(
    refresh_one: Callable[[Any], Any],
    like: Any,
    entries: Any,
    costs: Any,
    schedule: Every,
    count: jax.Array,
    select: Callable[[Any, jax.Array], jax.Array] | None = None,
) -> Any:
    """Replaces the due matrices' entries by what `refresh_one` makes of them.

    Args:
      refresh_one: from the entry of one matrix (a pytree without batch axes) to its new value, of
        the same structure, shapes and dtypes.
      like: a tree of matrices `(..., m, n)`, whose leading axes are the batch.
      entries: a tree with a pytree of arrays, the batch axes first, for every leaf of `like`; or
        None where there is nothing to refresh.
      costs: a tree like `like`: what refreshing one matrix costs, in any unit.
      schedule: which steps are due.
      count: the step, from 1.
      select: from a batch's entry and which of its matrices the schedule says are due, bool
        (size,), to those that are.
    """
    leaves, treedef = jax.tree.flatten(like)
    results = treedef.flatten_up_to(entries)
    prices = treedef.flatten_up_to(costs)
    places = [i for i, entry in enumerate(results) if entry is not None]
    shapes = [leaves[i].shape[:-2] for i in places]
    sizes = [math.prod(shape) for shape in shapes]
    tables: Sequence[np.ndarray | None] = [None] * len(places)
    if schedule.stagger:
        tables = _deal(sizes, [prices[i] for i in places], schedule.period)
    for i, shape, size, table in zip(places, shapes, sizes, tables, strict=True):
        if table is None:
            order, rounds = jnp.arange(size), jnp.where(schedule.due(count), size, 0)
        else:
            order, rounds = _turn(table, schedule, count)
        if select is not None:
            due = functools.partial(select, results[i])
            order, rounds = _selected(due, order, rounds, size)
        results[i] = _loop(refresh_one, results[i], len(shape), order, rounds)
    return treedef.unflatten(results)


def visit_all(
    visit: Callable[[Any], Any], batch: Any, batch_shape: tuple[int, ...], count: jax.Array
) -> Any:
    """Replaces every entry of a batch by what `visit` makes of it, one after the other, in place.

    The loops of several batches run one after the other as well, in the same temporaries: their
    number of rounds has to look as if it depended on the step, or XLA unrolls a single round.
    """
    size = math.prod(batch_shape)
    rounds = jnp.where(count > 0, size, 0)
    return _loop(visit, batch, len(batch_shape), jnp.arange(size), rounds)


def untried(state: Any) -> jax.Array:
    """Which matrices were due and have found nothing yet: they are tried again at every step."""
    return (state.refreshes == 0) & (state.rejected > 0)


def at_most_once(f: Callable[..., Any], due: jax.Array, given: Any, state: Any) -> Any:
    """`f(given, state)` if due, else `state`; `f` keeps structure, shapes and dtypes.

    A `lax.cond` would copy the state that it hands through; a loop of no rounds does not.
    """
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda j, s: f(_anew(given, j), s), state)


def _anew(x: Any, j: jax.Array) -> Any:
    """`x`, as something that depends on the round `j` of a loop.

    XLA moves what is the same in every round out of a loop, and it would be done at every step.
    """
    return jax.lax.optimization_barrier((x, j))[0]


def _loop(visit: Any, batch: Any, ndim: int, entries: jax.Array, rounds: jax.Array) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    flat = [x.reshape(-1, *x.shape[ndim:]) for x in leaves]

    def body(j: jax.Array, flat: list[jax.Array]) -> list[jax.Array]:
        i = entries[j]
        one = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in flat]
        one = _anew(one, j)  # the only entry of a batch of one is the same in every round
        new = jax.tree.leaves(visit(treedef.unflatten(one)))
        # An entry that `visit` hands back as it was is not written.
        return [
            x if y is old else jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0)
            for x, y, old in zip(flat, new, one, strict=True)
        ]

    flat = jax.lax.fori_loop(0, rounds, body, flat)
    return treedef.unflatten([y.reshape(x.shape) for y, x in zip(flat, leaves, strict=True)])


def _selected(
    select: Callable[[jax.Array], jax.Array], entries: jax.Array, rounds: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The entries to visit of a batch of `size`, and how many, after `select`."""
    if size == 1:
        return jnp.zeros(1, jnp.int32), select(rounds[None] > 0)[0].astype(jnp.int32)
    scheduled = jnp.where(jnp.arange(len(entries)) < rounds, entries, size)
    due = select(jnp.zeros(size, bool).at[scheduled].set(True, mode="drop"))
    return jnp.nonzero(due, size=size)[0], jnp.sum(due)


def _turn(table: np.ndarray, schedule: Every, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The due entries of a staggered batch at step `count`, and how many there are."""
    phase = schedule.phase(count)
    filled = jnp.asarray((table >= 0).sum(axis=1))[phase]
    if not schedule.first:
        return jnp.asarray(table)[phase], filled
    size = int((table >= 0).sum())
    wide = np.full((table.shape[0], size), -1)
    wide[:, : table.shape[1]] = table
    all_due = count == 1
    entries = jnp.where(all_due, jnp.arange(size), jnp.asarray(wide)[phase])
    return entries, jnp.where(all_due, size, filled)


def _deal(sizes: Sequence[int], costs: Sequence[float], period: int) -> list[np.ndarray]:
    """For every batch a table (period, width): the entries due at each phase, padded with -1."""
    load = [0.0] * period
    due: list[list[list[int]]] = [[[] for _ in range(period)] for _ in sizes]
    order = sorted(range(len(sizes)), key=lambda i: -costs[i])
    for i in order:
        for entry in range(sizes[i]):
            phase = min(range(period), key=load.__getitem__)
            load[phase] += costs[i]
            due[i][phase].append(entry)
    tables = []
    for phases in due:
        width = max(map(len, phases), default=0)
        tables.append(np.array([p + [-1] * (width - len(p)) for p in phases]))
    return tables
