"""Large stacks in chunks: the temporaries of a step are those of one chunk.

A transformation of a stack `(N, m, n)` makes temporaries as large as the stack, in float32 even if
the gradients are in bfloat16. `in_chunks` runs it on a few matrices at a time, in a loop that
updates the state and writes the directions over the gradients in place. The matrices of a stack do
not influence each other, so the numbers are the same. Moments in codes are decoded there too.

*Memory*: the temporaries of at most `CHUNK` elements, or of one matrix. *Cost*: a loop copies the
gradients and the state of each chunk out and back, which without a loop would be used where they
lie. So two kinds of stacks stay whole:

* If the state has more than `HEAVY` float32 numbers per element, temporaries are small next to it,
  and copying it would double the traffic.
* A direction that reads the gradients twice, to project them and back, makes next to no temporaries
  of their size, and a loop would read them twice more. It says so (`projects=True`); moments in
  codes are decoded in chunks all the same.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from .._stacks import StateSplit
from ..storage._lazy_moments import decoded_tree, encoded_tree, is_lazy

CHUNK = 2**25
"""Stacks of more elements are processed in chunks of at most this many: 128 MiB in float32."""

HEAVY = 1.5
"""Stacks stay whole if their state takes more than this many float32 numbers an element."""


def in_chunks(
    inner: optax.GradientTransformationExtraArgs, *, projects: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation of a stack `(N, m, n)` on chunks of it, if it is large."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        g = updates

        def run(g: Any, state: Any, params: Any) -> tuple[Any, Any]:
            direction, new = inner.update(g, decoded_tree(state), params, **extra_args)
            return direction, encoded_tree(new, state)

        size = matrices_in_chunk(g.shape)
        if size == len(g):
            return run(g, state, params)
        split = StateSplit.of(state, g.shape[:1])
        own, shared = split.parts(state)
        in_codes = any(map(is_lazy, jax.tree.leaves(state, is_leaf=is_lazy)))
        heavy = sum(x.nbytes for x in own) > HEAVY * 4 * g.size
        if heavy or (projects and not in_codes) or any(x.ndim for x in shared):
            return run(g, state, params)

        def visit(start: Any, size: int, carry: Any) -> Any:
            stack, own, _ = carry
            x, old, p = _slices((stack, own, params), start, size)
            direction, new = run(x, split.joined(old, shared), p)
            new_own, new_shared = split.parts(new)
            direction = direction.astype(g.dtype)
            return _replaced(stack, direction, start), _replaced(own, new_own, start), new_shared

        rounds, rest = divmod(len(g), size)
        carry = jax.lax.fori_loop(
            0, rounds, lambda i, carry: visit(i * size, size, carry), (g, own, shared)
        )
        if rest:
            carry = visit(rounds * size, rest, carry)
        direction, own, shared = carry
        return direction, split.joined(own, shared)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def matrices_in_chunk(shape: tuple[int, ...]) -> int:
    """The number of matrices in a chunk; the chunks of a stack are as even as possible."""
    number, *matrix = shape
    most = max(1, CHUNK // max(1, math.prod(matrix)))
    return math.ceil(number / math.ceil(number / most))


def _slices(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)


def _replaced(tree: Any, part: Any, start: Any) -> Any:
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), tree, part
    )
