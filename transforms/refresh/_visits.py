"""Work on some matrices of a batch: loops that take one out, change it, and put it back in place.

`lax.cond` under `vmap` computes both branches, and one `cond` per matrix copies the state that it
does not change. Here each batch has one loop with one round per matrix to visit, so with no rounds
at most steps. A round takes one matrix out of the batch, works on it, and writes it back in place.
Temporaries are those of one matrix, whatever the size of the batch.

*On GPUs* a round takes several factors if all of them are due, they are not in few bits, and the
work on them has no choices that would save some of it. The kernels beside a decomposition are then
launched once, and a batched `eigh` (cuSOLVER's `syevBatched`) takes about as long for many matrices
as for two. From `LARGE` numbers on, single ones are faster if there are few. What is left goes one
by one. Milliseconds of a matrix on an H100 (JAX 0.11.2):

| order | one | 2 to 4 | 8 | 24 | 72 |
|---|---|---|---|---|---|
| 256 | 2.3 | | 0.4 | | 0.05 (96) |
| 512 | 5.0 | 7.6 | | 1.1 | |
| 768 | 9.0 | 15 to 27 | 7.5 | 2.2 | 1.1 |
| 1024 | 12 | 37 | 8.5 | 2.9 | |
| 2048 | 26 | 129 | 26 | | |
| 3072 | 54 | 218 | 69 (6) | | |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..linalg._platforms import by_rows, on_gpus
from ..linalg._spread import is_shared

TOGETHER = 2**25
"""GPUs visit as many matrices at once as have this many numbers: 128 MiB in float32."""

DECOMPOSED = 2**24
"""And refresh as many as have this many: 256 of order 256, 28 of order 768, 16 of order 1024."""

LARGE, FEW = 2**17, 8
"""But those of `LARGE` numbers, from order 363 on, alone if there would be fewer than `FEW`."""


def visit_due(
    visit: Any, batch: Any, batch_shape: tuple[int, ...], due: jax.Array, numbers: int | None
) -> Any:
    """Applies `visit` to all entries of a batch or none, or to those that are due, bool (size,)."""
    size = math.prod(batch_shape)
    together = 1 if is_shared() else _at_once(size, numbers, DECOMPOSED)
    if numbers is not None and numbers >= LARGE and together < FEW:
        together = 1

    def visited(batch: Any, due: jax.Array, together: int = 1) -> Any:
        """Those of the groups of so many entries that are due."""
        each = visit if together == 1 else jax.vmap(visit)
        groups = size // together
        if due.ndim == 0:
            first, rounds = lambda j, _: j * together, jnp.where(due, groups, 0)
        else:
            starts = jnp.arange(0, size, together)
            first = lambda _, last: jnp.argmax(due & (starts > last)) * together  # noqa: E731
            rounds = jnp.sum(due)
        return _loop(each, batch, len(batch_shape), first, rounds, together)

    def several(batch: Any) -> Any:
        if due.ndim == 0:
            return visited(batch, due, together)
        whole = due.reshape(-1, together).all(axis=1)
        batch = visited(batch, whole, together)
        return visited(batch, due & ~jnp.repeat(whole, together))

    one = functools.partial(visited, due=due)
    return on_gpus(several, one, batch) if together > 1 else one(batch)


def visit_all(
    visit: Callable[[Any], Any],
    batch: Any,
    batch_shape: tuple[int, ...],
    count: jax.Array,
    numbers: int | None = None,
) -> Any:
    """Applies `visit` to every entry of a batch, one after the other, in place.

    Several batches are visited one after the other as well, and share their temporaries. For this
    the number of rounds must appear to depend on the step: XLA unrolls a loop of one known round.
    The name tells it to profiles and to `benchmarks/_programs.py`.

    Args:
      visit: maps an entry to one of the same structure, shapes and dtypes.
      batch: a pytree of arrays with the batch axes first.
      batch_shape: these axes.
      count: the step, from 1.
      numbers: how many numbers the largest matrix has that `visit` makes of an entry, if `visit`
        takes batches of entries too. GPUs, which launch all kernels again in each round, then visit
        several entries in one.
    """
    size = math.prod(batch_shape)

    def in_rounds(entries: int, batch: Any) -> Any:
        rounds = jnp.where(count > 0, size // entries, 0)
        with jax.named_scope(f"rounds_{size // entries}"):
            first = lambda j, _: j * entries  # noqa: E731
            return _loop(visit, batch, len(batch_shape), first, rounds, entries)

    together = _at_once(size, numbers, TOGETHER)
    several, one = (functools.partial(in_rounds, number) for number in (together, 1))
    return on_gpus(several, one, batch) if together > 1 else one(batch)


def _at_once(size: int, numbers: int | None, most: int) -> int:
    """How many entries of a batch are at most so many numbers, if one has `numbers`."""
    return 1 if numbers is None else _divisor(size, most // numbers)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most`, at least 1."""
    return max(i for i in range(1, max(1, min(size, most)) + 1) if size % i == 0)


def at_most_once(f: Callable[..., Any], due: jax.Array, given: Any, state: Any) -> Any:
    """`f(given, state)` if due, else `state`; `f` keeps its structure, shapes and dtypes.

    A `lax.cond` would copy a state that it does not change; a loop with no rounds does not.
    """
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda j, s: f(_anew(given, j), s), state)


def _anew(x: Any, j: jax.Array) -> Any:
    """`x`, made to depend on the round `j` of a loop.

    XLA hoists loop invariants out of the loop, and would then compute them at every step.
    """
    return jax.lax.optimization_barrier((x, j))[0]


def traced_once(visit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`visit`, traced once for all entries of the same shapes.

    What it returns as it was stays the same array, for `_loop`. Another
    call traces it anew: that may be for other devices (`linalg/_spread.py`).
    """
    unchanged: dict[Any, list[bool]] = {}

    def shapes(entry: Any) -> Any:
        leaves, treedef = jax.tree.flatten(entry)
        return treedef, tuple((x.shape, x.dtype) for x in leaves)

    @jax.jit
    def changed(entry: Any) -> list[jax.Array]:
        new, old = jax.tree.leaves(visit(entry)), jax.tree.leaves(entry)
        same = unchanged[shapes(entry)] = [x is y for x, y in zip(new, old, strict=True)]
        return [x for x, kept in zip(new, same, strict=True) if not kept]

    def shared(entry: Any) -> Any:
        found = iter(changed(entry))
        leaves, treedef = jax.tree.flatten(entry)
        same = unchanged[shapes(entry)]
        new = [x if kept else next(found) for x, kept in zip(leaves, same, strict=True)]
        return treedef.unflatten(new)

    return shared


def _loop(
    visit: Any,
    batch: Any,
    ndim: int,
    next_of: Callable[[jax.Array, jax.Array], jax.Array],
    rounds: jax.Array,
    together: int = 1,
) -> Any:
    """Visits as many entries, of which `next_of` gives the first from the round and the last."""
    leaves, treedef = jax.tree.flatten(batch)
    flat = [x.reshape(-1, *x.shape[ndim:]) for x in leaves]
    if together == 1:
        take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        put = jax.lax.dynamic_update_index_in_dim
    else:
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=together)
        put = jax.lax.dynamic_update_slice_in_dim

    def body(j: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> Any:
        last, flat = carry
        i = next_of(j, last).astype(jnp.int32)
        one = [take(x, i) for x in flat]
        one = _anew(one, j)  # in a batch of one, the entry is loop-invariant
        one = by_rows(one)
        new = jax.tree.leaves(visit(treedef.unflatten(one)))
        # An array that `visit` returns unchanged is not written.
        changed = [k for k, (y, old) in enumerate(zip(new, one, strict=True)) if y is not old]
        written = by_rows([new[k].astype(flat[k].dtype) for k in changed])
        flat = list(flat)
        for k, y in zip(changed, written, strict=True):
            flat[k] = put(flat[k], y, i, 0)
        return i, flat

    _, flat = jax.lax.fori_loop(0, rounds, body, (jnp.int32(-1), flat))
    return treedef.unflatten([y.reshape(x.shape) for y, x in zip(flat, leaves, strict=True)])
