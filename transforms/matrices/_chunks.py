"""Large stacks in chunks: the temporaries of a step are those of one chunk.

A transformation of a stack `(N, m, n)` makes temporaries as large as the stack, in float32. In a
loop over chunks it updates the state and writes the directions over the gradients in place, which
copies gradients and state out and back. So a stack stays whole if copying its state would cost more
than the temporaries (`HEAVY`), or if the direction reads the gradients only to project them
(`projects=True`). The matrices of a stack do not influence each other, so the numbers are the same.
"""

import functools
import math
from typing import Any

import jax
import optax

from .._stacks import StateSplit
from ..storage._lazy_moments import decoding, is_lazy

CHUNK = 2**25
"""Stacks of more elements are processed in chunks of at most this many: 128 MiB in float32."""

HEAVY = 1.5
"""Stacks stay whole if their state takes more than this many float32 numbers an element."""


def in_chunks(
    inner: optax.GradientTransformationExtraArgs, *, projects: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation of a stack `(N, m, n)`, on chunks of it if it is large.

    It is traced once for all stacks of the same shapes. Lazy moments are decoded, in chunks too.
    """
    by_chunks = functools.partial(_by_chunks, inner.update, projects)
    decoded = functools.partial(_by_chunks, decoding(inner), False)
    traced = {f: jax.jit(f) for f in (inner.update, by_chunks, decoded)}

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        step = inner.update if updates.size <= CHUNK else by_chunks
        if any(map(is_lazy, jax.tree.leaves(state, is_leaf=is_lazy))):
            step = decoded
        with_arguments: Any = functools.partial(step, **extra_args)
        return (jax.jit(with_arguments) if extra_args else traced[step])(updates, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _by_chunks(
    update: Any, projects: bool, g: Any, state: Any, params: Any, **extra_args: Any
) -> tuple[Any, Any]:
    """The update of a stack, on chunks of it unless it stays whole."""
    size = matrices_in_chunk(g.shape)
    split = StateSplit.of(state, g.shape[:1])
    arrays, shared = split.parts(state)
    heavy = sum(x.nbytes for x in jax.tree.leaves(arrays)) > HEAVY * 4 * g.size
    if size == len(g) or heavy or projects or any(x.ndim for x in jax.tree.leaves(shared)):
        return update(g, state, params, **extra_args)

    def visit(start: Any, size: int, carry: Any) -> Any:
        *whole, _ = carry
        x, old, p = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), (*whole, params)
        )
        direction, new = update(x, split.joined(old, shared), p, **extra_args)
        new_own, new_shared = split.parts(new)
        stack, arrays = jax.tree.map(
            lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 0),
            tuple(whole),
            (direction.astype(g.dtype), new_own),
        )
        return stack, arrays, new_shared

    rounds, rest = divmod(len(g), size)
    carry = jax.lax.fori_loop(
        0, rounds, lambda i, carry: visit(i * size, size, carry), (g, arrays, shared)
    )
    if rest:
        carry = visit(rounds * size, rest, carry)
    direction, arrays, shared = carry
    return direction, split.joined(arrays, shared)


def matrices_in_chunk(shape: tuple[int, ...]) -> int:
    """The number of matrices in a chunk; the chunks of a stack are as even as possible."""
    number, *matrix = shape
    most = max(1, CHUNK // max(1, math.prod(matrix)))
    return math.ceil(number / math.ceil(number / most))
