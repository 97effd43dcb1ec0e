"""One array of matrices at a time: a leaf of a tree, or a stack of the matrix view.

Directions are written for one array `(..., m, n)`, and so are their states. `each_array` makes a
transformation of trees of one: its state is a tree of their states, or on a single array, which is
a tree too, the direction's own.

Two things concern more than one array: random keys are folded from the paths of parameters, of
which a stack holds several, and staggered refreshes are dealt over the matrices of all arrays. Both
are decided in `init`, from the plan of the arrays here, and kept in the state.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ._arrays import check_matrices
from ._paths import place_of
from ._recording import Work, holding, is_repeated, record
from ._trees import map_unzip
from ._validate import check_state_given

IMPLEMENTATION = "threefry2x32"

Members = tuple[tuple[str, int], ...]  # parameters and their numbers of matrices


class Planned(NamedTuple):
    """An array of the plan."""

    like: jax.ShapeDtypeStruct  # (..., m, n)
    members: Members  # whose matrices it holds, in order
    devices: np.ndarray  # the device that owns each matrix, int (N,)


class Plan(NamedTuple):
    """All arrays that are initialized together, and which of them is at work."""

    arrays: Mapping[str, Planned]
    key: str | None = None


_plan: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("plan", default=None)


def planned(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Declares the plan for `init` inside."""
    return holding(_plan, plan)


def as_planned(key: str, x: Any, members: Members | None = None) -> Planned:
    """An array in the plan of one device; by default it holds the matrices of one parameter."""
    count = math.prod(x.shape[:-2])
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return Planned(like, members or ((key, count),), np.zeros(count, int))


def plan_for(x: Any) -> Plan:
    """The plan in which the array `x` is at work; without one it is alone."""
    plan = _plan.get()
    if plan is None or plan.key is None:
        return Plan({"": as_planned("", x)}, "")
    return plan


def projected(
    f: Callable[[Any], tuple[int, ...]], x: Any
) -> contextlib.AbstractContextManager[None]:
    """The plan of arrays whose matrices `f` maps to others, for `init` inside."""
    plan = plan_for(x)

    def mapped(array: Planned) -> Planned:
        return array._replace(like=jax.ShapeDtypeStruct(f(array.like), array.like.dtype))

    return planned(plan._replace(arrays={k: mapped(array) for k, array in plan.arrays.items()}))


def each_array(
    name: str,
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    *,
    work: str | None = "decompositions",
) -> optax.GradientTransformation:
    """A transformation of trees from the `init` and `update` of one array `(..., m, n)`.

    Its `init` requires matrices, in the `name` of the transformation, and records the kind of
    `work` (`Work`); `None` is a few passes over the array, which no devices need to share. Extra
    arguments reach `update` if a `GradientTransformationExtraArgs` is made of the result.
    """

    def init_all(params: Any) -> Any:
        if not is_repeated():
            check_matrices(params, name)
            if work is not None:
                record(Work(work))
        return init_each(init, params)

    def update_all(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_state_given(state)
        arguments = (state,) if params is None else (state, params)
        if jax.tree_util.all_leaves([updates]):
            return update(updates, *arguments, **extra_args)
        return map_unzip(2, functools.partial(update, **extra_args), updates, *arguments)

    return optax.GradientTransformation(init_all, update_all)


def init_each(init: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of `init(x)` for each array of `tree`, in its place in the plan (`plan_of`)."""
    if jax.tree_util.all_leaves([tree]):
        return init(tree)
    plan, states = plan_of(tree), []
    leaves, treedef = jax.tree.flatten(tree)
    for key, x in zip(plan.arrays, leaves, strict=True):
        with planned(plan._replace(key=key)):
            states.append(init(x))
    return treedef.unflatten(states)


def plan_of(tree: Any) -> Plan:
    """The plan of the arrays of `tree`: that in force, if it has them."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    names = [place_of(path) for path, _ in pairs]
    plan = _plan.get()
    if plan is not None and plan.key is None and [*plan.arrays] == names:
        return plan
    return Plan({name: as_planned(name, x) for name, (_, x) in zip(names, pairs, strict=True)})


class StateSplit(NamedTuple):
    """The arrays of one array's state that have its batch axes, and all others, such as counts."""

    treedef: Any
    batched: tuple[bool, ...]

    @classmethod
    def of(cls, state: Any, batch: tuple[int, ...]) -> StateSplit:
        """From the state of an array whose axes before the matrices are `batch`."""
        leaves, treedef = jax.tree.flatten(state)
        return cls(treedef, tuple(x.shape[: len(batch)] == batch and x.ndim > 0 for x in leaves))

    def parts(self, state: Any) -> tuple[Any, Any]:
        """The state with the arrays that have batch axes, and with the others: holes elsewhere."""
        pairs = list(zip(self.treedef.flatten_up_to(state), self.batched, strict=True))
        batched, others = ([x if b is part else None for x, b in pairs] for part in (True, False))
        return self.treedef.unflatten(batched), self.treedef.unflatten(others)

    def joined(self, batched: Any, others: Any) -> Any:
        """The inverse of `parts`; it takes lists of the arrays too."""
        arrays, rest = iter(jax.tree.leaves(batched)), iter(jax.tree.leaves(others))
        return self.treedef.unflatten([next(arrays if b else rest) for b in self.batched])


def matrix_names(x: Any) -> Members:
    """The parameters whose matrices the array `x (..., m, n)` holds, in order."""
    plan = plan_for(x)
    assert plan.key is not None
    return plan.arrays[plan.key].members


def check_directions(
    part: str, inner: optax.GradientTransformation, like: Any, state: Any, params: Any = None
) -> None:
    """Requires `inner` to give directions of the shapes of gradients like these, for `init`."""
    # The products of `part`, the transformation around `inner`, would broadcast other shapes.
    if is_repeated():
        return
    arguments = (like, state, params)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        directions = jax.eval_shape(lambda *arguments: inner.update(*arguments)[0], *abstract)
    pairs = jax.tree_util.tree_leaves_with_path(like)
    for (path, x), y in zip(pairs, jax.tree.leaves(directions), strict=False):
        if y.shape != x.shape:
            name = place_of(path) or matrix_names(x)[0][0]
            raise ValueError(
                f"{part}: a direction inside must have the shape of its gradient, {x.shape} "
                f"for {name!r}; got {y.shape}."
            )


def matrix_keys(x: Any, seed: int) -> jax.Array:
    """Keys for the matrices of `x (..., m, n)`: of the parameter's path and the place in it."""
    # Every checkpoint format supports key data, uint32 `(..., 2)`.
    base = jax.random.key(seed, impl=IMPLEMENTATION)

    def key_of(name: Any, place: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(base, name), place)

    # One call for all: two programs for each of 400 parameters take a minute to compile.
    members = matrix_names(x)
    counts = [count for _, count in members]
    hashes = np.array([zlib.crc32(name.encode()) for name, _ in members], np.uint32)
    names = np.repeat(hashes, counts)
    places = np.concatenate([np.arange(count, dtype=np.uint32) for count in counts])
    return jax.random.key_data(jax.vmap(key_of)(names, places)).reshape(*x.shape[:-2], -1)


def key_for(data: jax.Array, number: jax.Array) -> jax.Array:
    """The key of draw `number`, from a matrix's key data `(2,)`."""
    return jax.random.fold_in(jax.random.wrap_key_data(data, impl=IMPLEMENTATION), number)
