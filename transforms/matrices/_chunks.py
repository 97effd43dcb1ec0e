"""Large stacks in chunks: the temporaries of a step are those of one chunk.

A transformation on a stack `(N, m, n)` makes temporaries as large as the stack, in float32 even if
the gradients are in bfloat16. `in_chunks` runs it on a few matrices at a time, in a loop that
updates the state and writes the directions over the gradients in place. The matrices of a stack do
not influence each other, so the numbers are the same. Moments in codes are decoded there too.

A transformation for which that is not so runs on the whole stacks, as do staggered refreshes, which
are distributed over all matrices. The program of one chunk tells.

*Memory*: the temporaries of at most `CHUNK` elements, or of one matrix. *Cost*: a loop copies the
state of each chunk out and back, which without a loop would be updated where it lies. So stacks
with a state of more than `HEAVY` float32 numbers an element stay whole: beside it temporaries are
small, and to copy it would double what a step moves.
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
from .._recording import record, recording
from ..linalg._spread import is_shared
from ..refresh._due import Staggered
from ..storage._undecoded import decoded_tree, encoded_tree

CHUNK = 2**25
"""Stacks of more elements are processed in chunks of at most this many: 128 MiB in float32."""

HEAVY = 1.5
"""Stacks stay whole if their state takes more than this many float32 numbers an element."""

Stacks = dict[str, Any]


def in_chunks(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation of a dict of stacks `(N, m, n)` on chunks of the large ones."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        def run(keys: Sequence[str], state: Any, gradients: Stacks, params: Stacks | None) -> Any:
            own = None if params is None else {key: params[key] for key in keys}
            given = {key: gradients[key] for key in keys}
            directions, new = inner.update(given, decoded_tree(state), own, **extra_args)
            return directions, encoded_tree(new, state)

        large = [key for key, x in updates.items() if matrices_in_chunk(x.shape) < x.shape[0]]
        large = [] if is_shared() else large
        cut = _Cut.of(state, updates) if large else None
        if cut is not None:
            large = [key for key in large if not cut.is_heavy(key, updates[key])]
        if cut is None or not large:
            return run([*updates], state, updates, params)
        directions, parts, steps = {}, {}, {}
        for key in large:
            step = _loop(key, run, cut, updates[key], None if params is None else params[key])
            if step is None:
                return run([*updates], state, updates, params)
            steps[key] = step
        for key, step in steps.items():
            directions[key], parts[key] = step()
        rest = [key for key in updates if key not in large]
        if rest:
            found, new = run(rest, cut.state_of(rest), updates, params)
            directions |= found
            parts |= cut.parts_of(rest, new)
        return {key: directions[key] for key in updates}, cut.joined(parts)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def matrices_in_chunk(shape: tuple[int, ...]) -> int:
    """The number of matrices in a chunk; the chunks of a stack are as even as possible."""
    number, *matrix = shape
    most = max(1, CHUNK // max(1, math.prod(matrix)))
    return math.ceil(number / math.ceil(number / most))


def _loop(key: str, run: Any, cut: _Cut, gradients: Any, params: Any) -> Callable[[], Any] | None:
    """The update of one stack, chunk by chunk; `None` if its matrices influence each other."""
    own, shared = cut.parts[key]
    size = matrices_in_chunk(gradients.shape)

    def chunk(gradients: Any, own: Any, params: Any) -> Any:
        state = cut.joined({key: (own, shared)})
        given = None if params is None else {key: params}
        directions, state = run([key], state, {key: gradients}, given)
        return directions[key].astype(gradients.dtype), *cut.parts_of([key], state)[key]

    def slices(tree: Any, start: Any, size: int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)

    def replaced(tree: Any, part: Any, start: Any) -> Any:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), tree, part
        )

    first = jax.eval_shape(lambda given: slices(given, 0, size), (gradients, own, params))
    with recording() as events:
        closed, shapes = jax.make_jaxpr(chunk, return_shape=True)(*first)
    found = influences(closed, 1)
    apart = Influence.NUMBER not in found and not any(found[len(found) - len(shared) :])
    if not apart or any(isinstance(event, Staggered) for event in events):
        return None
    structure = jax.tree.structure(shapes)

    def visit(start: Any, size: int, carry: Any, work: Callable[..., Any]) -> Any:
        x, own, _ = carry
        directions, new, shared = work(*slices((x, own, params), start, size))
        return replaced(x, directions, start), replaced(own, new, start), shared

    def traced(*given: Any) -> Any:
        return structure.unflatten(jaxpr_as_fun(closed)(*jax.tree.leaves(given)))

    def step() -> Any:
        for event in events:
            record(event)
        rounds, rest = divmod(len(gradients), size)
        carry = jax.lax.fori_loop(
            0,
            rounds,
            lambda i, carry: visit(i * size, size, carry, traced),
            (gradients, own, shared),
        )
        if rest:
            carry = visit(rounds * size, rest, carry, chunk)
        directions, *parts = carry
        return directions, tuple(parts)

    return step


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A state, cut into the parts of its stacks and what they share."""

    treedef: Any
    stacked: tuple[bool, ...]  # which nodes have an entry per stack
    parts: dict[str, tuple[list[Any], list[Any]]]  # per stack its entries, and what all share

    @classmethod
    def of(cls, state: Any, stacks: Stacks) -> _Cut | None:
        """`None` if an array in the entry of a stack `(N, m, n)` lacks the first axis `N`."""

        def is_stacked(node: Any) -> bool:
            return isinstance(node, dict) and node.keys() == stacks.keys()

        nodes, treedef = jax.tree.flatten(state, is_leaf=is_stacked)
        cut = cls(treedef, tuple(map(is_stacked, nodes)), {})
        cut.parts.update(cut.parts_of([*stacks], state))
        even = all(
            x.shape[:1] == stacks[key].shape[:1]
            for key, (own, _) in cut.parts.items()
            for x in jax.tree.leaves(own)
        )
        return cut if even else None

    def is_heavy(self, key: str, stack: jax.Array) -> bool:
        """Whether copies of a stack's state would cost more than its temporaries do."""
        own, _ = self.parts[key]
        return sum(x.nbytes for x in jax.tree.leaves(own)) > HEAVY * 4 * stack.size

    def parts_of(self, keys: Sequence[str], state: Any) -> dict[str, tuple[list[Any], list[Any]]]:
        """The parts of a state that has entries for `keys`."""
        nodes = list(zip(self.treedef.flatten_up_to(state), self.stacked, strict=True))
        shared = [node for node, stacked in nodes if not stacked]
        return {key: ([node[key] for node, stacked in nodes if stacked], shared) for key in keys}

    def joined(self, parts: dict[str, tuple[list[Any], list[Any]]]) -> Any:
        """The inverse of `parts_of`."""
        entries = zip(*(own for own, _ in parts.values()), strict=True)
        shared = iter(next(iter(parts.values()))[1])
        return self.treedef.unflatten(
            [
                dict(zip(parts, next(entries), strict=True)) if stacked else next(shared)
                for stacked in self.stacked
            ]
        )

    def state_of(self, keys: Sequence[str]) -> Any:
        """The state with the entries for `keys` alone."""
        return self.joined({key: self.parts[key] for key in keys})
