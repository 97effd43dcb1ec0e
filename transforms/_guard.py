"""Guards: keep non-finite gradients out of states and non-finite directions out of updates.

A matrix counts as finite if its sum of squares, in float32 at least, is finite. One that is not
takes part in the step with a zero gradient, and its direction is zero: its momentum and statistics
decay, it does not move, and nothing else is affected. `guard_leaves`: leaves of any shape.

*Damaged states.* A value in a state that is not finite, as from a damaged checkpoint, never leaves
a moment, basis or root by itself. It shows in the direction, which is then not finite although the
gradient is; so directions are checked, not states. The update of such a matrix is zero, and at the
beginning of the next step `init` makes its part of the state anew (`restarted`, in the matrix view,
a device's `Step` and `in_subspace`). A statistic does not show in the direction: a refresh that
finds it damaged starts it anew.

*Cost.* A pass over the gradient and one over the direction. A step without damage runs a loop of no
rounds, on the state that it was given; behind the step it would keep all directions alive.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._counts import Counts, counters
from ._paths import is_placeholder, named_leaves
from ._recording import PerParameter, record, repeated
from ._trees import where_entries, widened
from .linalg._loops import at_most_once
from .storage._lazy_moments import LazyMoments

KEPT = (jnp.dtype(jnp.int32), jnp.dtype(jnp.uint32))
"""Dtypes of the numbers that continue when a state starts anew: steps, phases and random keys."""

OWN = (Counts, LazyMoments)
"""Nodes of a state that start anew by themselves."""


@counters
class GuardCounts(NamedTuple):
    """The counters of `guard_matrices`."""

    value: Any
    names = ("skipped", "restarted", "damaged")
    # Steps with a non-finite gradient; how often the state started anew; 1 if it will at this step.


class MatrixGuardState(NamedTuple):
    counts: GuardCounts
    inner: Any  # state of the inner transformation


class GuardState(NamedTuple):
    skipped: Any  # steps with a non-finite gradient, int32 (leaves,)
    inner: Any  # state of the inner transformation


def guard_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on an array `(..., m, n)`, with zeros for each matrix that is not finite."""
    transform: Any = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return MatrixGuardState(GuardCounts.zeros(params.shape[:-2]), transform.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        finite = is_finite(updates)
        gradient = where_finite(finite, updates)
        direction, new = transform.update(gradient, state.inner, params, **extra_args)
        if jnp.shape(direction) != jnp.shape(updates):  # the matrix view refuses it
            return direction, MatrixGuardState(state.counts, new)
        damaged = ~all_finite(direction)
        sound = finite & ~damaged[..., None, None]
        counts = state.counts.plus(skipped=~finite[..., 0, 0], **state.counts.flags(damaged))
        return where_finite(sound, direction), MatrixGuardState(counts, new)

    return optax.GradientTransformationExtraArgs(init, update)


def restarted(
    init: Callable[[Any], Any],
    states: Mapping[str, Any],
    likes: Mapping[str, jax.Array],
    counts: str = "counts",
) -> dict[str, Any]:
    """States of stacks, as `init` gives them for the matrices that the last step found damaged.

    Two kinds of entries go on: integers of 32 bits, and `Counts`, see `Counts.restarted`. An array
    of a state belongs to the matrices if it starts with their axes. All stacks share a loop:
    programs for TPUs would move the states of small loops into the chip's memory and back.

    The states are for matrices like `likes (..., m, n)`; `counts` has a counter "damaged" `(...)`.
    """

    def chosen(damaged: jax.Array, old: Any, new: Any) -> Any:
        if isinstance(old, Counts):
            return where_entries(damaged, old.restarted(), old)
        if isinstance(old, LazyMoments):
            return old.restarted(damaged, new)
        if old.ndim == 0 and old.dtype == jnp.int32:
            return jnp.maximum(old, 0)  # a step count of Optax's in a damaged checkpoint
        if old.dtype in KEPT or old.shape[: damaged.ndim] != damaged.shape:
            return old
        return where_entries(damaged, new.astype(old.dtype), old)

    def anew(damaged: Mapping[str, jax.Array], states: Mapping[str, Any]) -> dict[str, Any]:
        fresh = {}
        for key, old in states.items():
            # Each matrix starts as it would alone, whichever others lie beside it.
            ndim, like = damaged[key].ndim, likes[key]
            with repeated():
                new = init(jnp.zeros((*[1] * ndim, *like.shape[ndim:]), like.dtype))
            started = functools.partial(chosen, damaged[key])
            fresh[key] = jax.tree.map(started, old, new, is_leaf=lambda x: isinstance(x, OWN))
        return fresh

    counts_of = operator.attrgetter(counts)
    damaged = {key: counts_of(state).of("damaged") > 0 for key, state in states.items()}
    due = functools.reduce(operator.or_, map(jnp.any, damaged.values()))
    return at_most_once(anew, due, damaged, dict(states))


def guard_leaves(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` with zeros in place of each leaf, of any shape, that is not finite."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        if is_placeholder(params):
            return GuardState(jnp.zeros(1, jnp.int32), inner.init(params))
        names = tuple(named_leaves(params).present())
        skipped = jnp.zeros(len(names), jnp.int32) if names else None
        record(PerParameter(names, (skipped,)))
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        finite = jax.tree.map(lambda x: is_finite(x, axis=None), updates)
        gradients, skipped = where_finite(finite, updates), state.skipped
        updates, inner_state = inner.update(gradients, state.inner, params, **extra_args)
        if flags := jax.tree.leaves(finite):
            skipped = skipped + (~jnp.stack(flags)).astype(jnp.int32)
        return where_finite(finite, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def is_finite(x: jax.Array, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Whether sums of squares over `axis` are finite: `(..., 1, 1)` for matrices `(..., m, n)`."""
    wide = widened(x)
    return jnp.isfinite(jnp.sum(wide * wide, axis=axis, keepdims=axis is not None))


def all_finite(x: jax.Array) -> jax.Array:
    """Whether matrices `(..., m, n)` are finite, by their sums: a quarter of the time, on a CPU."""
    return jnp.isfinite(jnp.sum(x, axis=(-2, -1), dtype=np.promote_types(x.dtype, np.float32)))


def where_finite(finite: Any, tree: Any) -> Any:
    """The arrays of `tree`, zero where `finite`, whose arrays have the same ranks, is False."""
    return jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)
