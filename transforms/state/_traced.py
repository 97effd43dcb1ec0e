"""The abstract state of an optimizer, with the records of its parts from the trace of `init`.

Nothing is computed, so tools work for models of any size. Keys of stacks describe these (`Key`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from .._arrays import check_array
from .._own_state import holds_state
from .._paths import named_leaves, place_of
from .._recording import PerParameter, recording
from ..distribute._distribute import Division
from ..distribute._layout import BoxedState, is_divided
from ..matrices._form import MatrixForm
from ..matrices._view import MatrixViewState, ViewRecord


class Traced(NamedTuple):
    """An optimizer's abstract state and the records of its parts."""

    state: Any
    packed: dict[str, tuple[str, ...]]  # by path, the parameters along an array's first axis
    events: tuple[Any, ...]  # everything that was recorded

    def map_divided(
        self,
        f: Callable[[Any, Division], Any],
        state: Any,
        undivided: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> Any:
        """`state` with `f(node, division)` for distributed parts, `undivided(leaf)` elsewhere."""

        def mapped(like: Any, node: Any) -> Any:
            if not is_divided(like):
                return undivided(node)
            node = node.unbox() if isinstance(node, BoxedState) else node
            new = f(node, _division(like))
            if is_divided(new):
                return type(like)(*new)
            return {key: new[key] for key in like.common}  # by the keys that describe them

        return jax.tree.map(mapped, self.state, state, is_leaf=is_divided)

    @property
    def divisions(self) -> tuple[Division, ...]:
        return tuple(map(_division, nodes_in(self.state, is_divided)))

    @property
    def mesh(self) -> Mesh | None:
        return next((division.mesh for division in self.divisions), None)

    @property
    def forms(self) -> dict[str, MatrixForm]:
        groups = [group for e in self.events if isinstance(e, ViewRecord) for group in e.groups]
        return {form.name: form for group in groups for form in group.members}

    @property
    def stacks(self) -> list[list[Stack]]:
        """The stacks of each matrix view, in the order of the state."""
        views = [node.inner for node in nodes_in(self.state, is_view)]
        return [[*map(stack_of, v.common if is_divided(v) else v)] for v in views]

    @property
    def undivided(self) -> Any:
        return self.map_divided(lambda _, division: division.layout.joined_shapes, self.state)


class Stack(NamedTuple):
    """The parameters whose matrices share an array, with their numbers of matrices, in order."""

    key: str
    members: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return sum(count for _, count in self.members)

    def slices(self) -> Iterator[tuple[str, slice]]:
        """The parameters and their slices of the first axis."""
        start = 0
        for name, count in self.members:
            yield name, slice(start, start + count)
            start += count

    def part(self, x: Any, place: slice) -> Any:
        """A parameter's slice of an array, or of its shape. Counts go to each parameter."""
        if jnp.ndim(x) == 0:
            return x
        if x.shape[0] != self.size:
            raise ValueError(
                f"the entry of the stack {self.key!r} has shape {x.shape}: its first axis must be "
                f"the stack's, of {self.size} matrices. (quantize_state merges vectors: give it "
                "where=lambda place, leaf: leaf.ndim > 2.)"
            )
        if place == slice(0, self.size):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(shape=(place.stop - place.start, *x.shape[1:]))
        return x[place]


def stack_of(key: Any) -> Stack:
    """The stack of a key in a traced state."""
    return Stack(str(key), tuple((form.name, form.count) for form in key.about.members))


def by_parameter(state: Any) -> Any:
    """A traced state, or one in its structure, with entries by parameter in place of stacks."""

    def of_view(node: Any) -> Any:
        if not is_view(node):
            return node
        by_name = {}
        for key, entries in node.inner.items():
            stack = stack_of(key)
            for name, place in stack.slices():
                part = functools.partial(stack.part, place=place)
                by_name[name] = jax.tree.map(part, entries)
        return MatrixViewState(by_name)

    return jax.tree.map(of_view, state, is_leaf=is_view)


def by_stack(like: Any, state: Any) -> Any:
    """The inverse of `by_parameter`, for a state whose stacked form is like `like`."""

    def of_view(stacked: Any, entries: Any) -> Any:
        if not is_view(stacked):
            return entries
        by_key = {}
        for key in stacked.inner:
            parts = (entries.inner[name] for name, _ in stack_of(key).members)
            by_key[key] = jax.tree.map(_array_of_stack, *parts)
        return MatrixViewState(by_key)

    return jax.tree.map(of_view, like, state, is_leaf=is_view)


def _array_of_stack(*parts: jax.Array) -> jax.Array:
    """The parts of a stack's array; of counts, which the parameters have alike, the largest."""
    if parts[0].ndim == 0:
        whole = jnp.issubdtype(parts[0].dtype, jnp.integer)
        return functools.reduce(jnp.maximum, parts) if whole else parts[0]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def traced(optimizer: Any, params: Any) -> Traced:
    """Traces `optimizer.init` for these parameters (or their shapes), which it checks."""
    check_optimizer(optimizer, params)
    for name, leaf in named_leaves(params).present().items():
        check_array(name, leaf)
    traces: list[Traced] = []

    def init(params: Any) -> Any:
        with recording() as events:
            state = optimizer.init(params)
        packed = {id(x): e.names for e in events if isinstance(e, PerParameter) for x in e.arrays}
        leaves = jax.tree_util.tree_leaves_with_path(state)
        names = {place_of(path): packed[id(x)] for path, x in leaves if id(x) in packed}
        traces.append(Traced(state, names, tuple(events)))
        return state

    state = jax.eval_shape(init, params)
    return traces[0]._replace(state=state)


def check_optimizer(
    optimizer: Any, params: Any, order: Sequence[str] = ("optimizer", "params", "state")
) -> None:
    """Requires an optimizer and a tree of parameters, in their places in `order`."""
    place = order.index("optimizer")
    first, second = (f"the {x} argument," for x in ("first", "second", "third")[place : place + 2])
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer, {first} must be an Optax transformation, such as "
            f"curvax.muon(0.02); got {type(optimizer)}."
        )
    name = order[place + 1]
    if isinstance(params, optax.GradientTransformation):
        raise ValueError(f"{name}, {second} must be a tree of parameters; got an optimizer.")
    if holds_state(params):
        raise ValueError(
            f"{name}, {second} must be a tree of parameters; got an optimizer's state. The order "
            f"is ({', '.join(order)})."
        )


def is_view(node: Any) -> bool:
    """Whether a node of a state is that of a matrix view."""
    return isinstance(node, MatrixViewState)


def nodes_in(state: Any, is_node: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes of a state that `is_node` finds."""
    return filter(is_node, jax.tree.leaves(state, is_leaf=is_node))


def _division(node: Any) -> Division:
    return next(iter(node.common)).division
