"""Large stacks in chunks: the temporaries of a step are those of one chunk.

A transformation on a stack `(N, m, n)` makes temporaries as large as the stack, in float32 even if
the gradients are in bfloat16. `in_chunks` runs it on a few matrices at a time, in a loop that
updates the state and writes the directions over the gradients in place. The matrices of a stack do
not influence each other, so the numbers are the same. Moments in codes are decoded there too.

A transformation for which that is not so runs on the whole stacks, as do staggered refreshes, which
are distributed over all matrices. The program of one chunk tells.

*Memory*: the temporaries of at most `CHUNK` elements, or of one matrix. *Cost*: a loop copies the
gradients and the state of each chunk out and back, which without a loop would be used where they
lie. So two kinds of stacks stay whole. Beside a state of more than `HEAVY` float32 numbers an
element temporaries are small, and to copy it would double what a step moves. And a transformation
of at most `FEW` passes over the gradients makes next to no temporaries of their size, but in a loop
takes as many passes again; unless its moments are in codes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import jaxpr_as_fun

from .._influence import Influence, influences
from .._passes import passes
from .._recording import record, recording
from ..linalg._spread import is_shared
from ..refresh._due import Staggered
from ..storage._undecoded import decoded_tree, encoded_tree, is_undecoded
from ._state_by_stack import StateByStack

CHUNK = 2**25
"""Stacks of more elements are processed in chunks of at most this many: 128 MiB in float32."""

HEAVY = 1.5
"""Stacks stay whole if their state takes more than this many float32 numbers an element."""

FEW = 2
"""Stacks stay whole if their update passes over them no more often: to project, and back."""


def in_chunks(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation of a dict of stacks `(N, m, n)` on chunks of the large ones."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        def run(keys: Sequence[str], state: Any, gradients: Any, params: Any) -> Any:
            own = None if params is None else {key: params[key] for key in keys}
            given = {key: gradients[key] for key in keys}
            directions, new = inner.update(given, decoded_tree(state), own, **extra_args)
            return directions, encoded_tree(new, state)

        large = [key for key, x in updates.items() if matrices_in_chunk(x.shape) < x.shape[0]]
        large = [] if is_shared() else large
        split = StateByStack.of(state, updates) if large else None
        if split is not None:
            large = [key for key in large if not is_heavy(split, key, updates[key])]
        if split is None or not large:
            return run([*updates], state, updates, params)
        directions, parts, loops = {}, {}, {}
        for key in large:
            loop = _Loop.of(key, run, split, updates[key], None if params is None else params[key])
            if not loop.is_apart:
                return run([*updates], state, updates, params)
            if loop.has_many_passes:
                loops[key] = loop
        for key, loop in loops.items():
            directions[key], parts[key] = loop.run()
        rest = [key for key in updates if key not in loops]
        if rest:
            found, new = run(rest, split.state_of(rest), updates, params)
            directions |= found
            parts |= split.parts_of(rest, new)
        return {key: directions[key] for key in updates}, split.joined(parts)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def matrices_in_chunk(shape: tuple[int, ...]) -> int:
    """The number of matrices in a chunk; the chunks of a stack are as even as possible."""
    number, *matrix = shape
    most = max(1, CHUNK // max(1, math.prod(matrix)))
    return math.ceil(number / math.ceil(number / most))


def is_heavy(split: StateByStack, key: str, stack: jax.Array) -> bool:
    """Whether copies of a stack's state would cost more than its temporaries do."""
    own, _ = split.parts[key]
    return sum(x.nbytes for x in jax.tree.leaves(own)) > HEAVY * 4 * stack.size


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The update of one stack, chunk by chunk."""

    chunk: Callable[..., Any]  # the update of some matrices
    traced: Callable[..., Any]  # that of a whole chunk
    stack: tuple[Any, Any, Any]  # gradients, their own state, and params
    shared: list[Any]  # the state that they share with other stacks
    events: list[Any]  # recorded while tracing
    is_apart: bool  # no matrix influences another
    has_many_passes: bool

    @classmethod
    def of(cls, key: str, run: Any, split: StateByStack, gradients: Any, params: Any) -> _Loop:
        """Traces one chunk of a stack."""
        own, shared = split.parts[key]
        size = matrices_in_chunk(gradients.shape)

        def chunk(gradients: Any, own: Any, params: Any) -> Any:
            state = split.joined({key: (own, shared)})
            given = None if params is None else {key: params}
            directions, state = run([key], state, {key: gradients}, given)
            return directions[key].astype(gradients.dtype), *split.parts_of([key], state)[key]

        stack = (gradients, own, params)
        first = jax.eval_shape(lambda stack: _slices(stack, 0, size), stack)
        with recording() as events:
            closed, shapes = jax.make_jaxpr(chunk, return_shape=True)(*first)
        structure = jax.tree.structure(shapes)

        def traced(*given: Any) -> Any:
            return structure.unflatten(jaxpr_as_fun(closed)(*jax.tree.leaves(given)))

        found = influences(closed, 1)
        influenced = Influence.NUMBER in found or any(found[len(found) - len(shared) :])
        staggered = any(isinstance(event, Staggered) for event in events)
        in_codes = any(map(is_undecoded, jax.tree.leaves(own, is_leaf=is_undecoded)))
        many = in_codes or passes(closed.jaxpr, first[0].size) > FEW
        return cls(chunk, traced, stack, shared, events, not (influenced or staggered), many)

    def run(self) -> tuple[Any, tuple[Any, Any]]:
        """The directions, and the parts of the new state."""
        gradients, own, params = self.stack
        size = matrices_in_chunk(gradients.shape)
        rounds, rest = divmod(len(gradients), size)

        def visit(start: Any, size: int, carry: Any, work: Callable[..., Any]) -> Any:
            x, own, _ = carry
            directions, new, shared = work(*_slices((x, own, params), start, size))
            return _replaced(x, directions, start), _replaced(own, new, start), shared

        for event in self.events:
            record(event)
        carry = jax.lax.fori_loop(
            0,
            rounds,
            lambda i, carry: visit(i * size, size, carry, self.traced),
            (gradients, own, self.shared),
        )
        if rest:
            carry = visit(rounds * size, rest, carry, self.chunk)
        directions, *parts = carry
        return directions, tuple(parts)


def _slices(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)


def _replaced(tree: Any, part: Any, start: Any) -> Any:
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), tree, part
    )
