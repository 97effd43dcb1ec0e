"""Keeping gradients that would poison a state out of it, and counting them.

A matrix whose sum of squares is not finite (in float32 at least) takes part in the step with a zero
gradient, and its direction is zero: momentum and statistics decay, nothing moves it, and nothing
else is affected. The same holds for every leaf of `guard_leaves`. One pass over the gradient tells.

Zeros in the place of a gradient that is to be multiplied would be another copy of it. What
`TakesUsable` gets the gradient as it is, and is told what is not usable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._paths import is_placeholder, named_leaves
from ._recording import record


class GuardState(NamedTuple):
    """State of `guard_matrices` and `guard_leaves`."""

    skipped: Any  # steps without a usable gradient, int32: (...) for a leaf, or (leaves,) for all
    inner: Any  # state of the inner transformation


class GuardRecord(NamedTuple):
    """What `recording` collects of `guard_leaves`: the parameters that the counters count for."""

    names: tuple[str, ...]
    skipped: jax.Array | None


class TakesUsable(optax.GradientTransformationExtraArgs):
    """A transformation of matrices whose `update` has an argument `usable`.

    It is a tree like the updates with booleans `(..., 1, 1)`, or `None` where all are usable. The
    state takes in zeros for a matrix that is not; its direction may be anything. Where `usable_of`
    is set, it makes that tree of the updates, for less than a pass over them.
    """

    usable_of: Callable[[Any], Any] | None = None


def guard_matrices(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every matrix `(..., m, n)` whose gradient is not usable."""
    inner = optax.with_extra_args_support(inner)
    own = inner.usable_of if isinstance(inner, TakesUsable) else None
    usable_of = own or functools.partial(jax.tree.map, is_usable)

    def init(params: Any) -> GuardState:
        skipped = jax.tree.map(lambda x: jnp.zeros(x.shape[:-2], jnp.int32), params)
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        usable = usable_of(updates)
        updates, inner_state = update_guarded(
            inner, updates, state.inner, params, usable, **extra_args
        )
        skipped = jax.tree.map(lambda n, u: n + ~u[..., 0, 0], state.skipped, usable)
        return all_usable(usable, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def guard_leaves(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every leaf of any shape whose gradient is not usable."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        if is_placeholder(params):
            return GuardState(jnp.zeros(1, jnp.int32), inner.init(params))
        names = tuple(named_leaves(params).present())
        skipped = jnp.zeros(len(names), jnp.int32) if names else None
        record(GuardRecord(names, skipped))
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        usable = jax.tree.map(lambda x: is_usable(x, axis=None), updates)
        updates = all_usable(usable, updates)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        flags = jax.tree.leaves(usable)
        skipped = state.skipped + ~jnp.stack(flags) if flags else state.skipped
        return all_usable(usable, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def update_guarded(
    inner: optax.GradientTransformation,
    updates: Any,
    state: Any,
    params: Any,
    usable: Any,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """`inner.update` on zeros for the matrices that are not `usable`, unless it takes that."""
    if isinstance(inner, TakesUsable):
        return inner.update(updates, state, params, usable=usable, **extra_args)
    return inner.update(all_usable(usable, updates), state, params, **extra_args)


def all_usable(usable: Any, updates: Any) -> Any:
    """The updates, zero where they are not `usable`; `None` means that all are."""
    return updates if usable is None else jax.tree.map(where_usable, usable, updates)


def is_usable(x: jax.Array, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Whether sums of squares over `axis` are finite: for matrices `(..., m, n)`, `(..., 1, 1)`.

    They are not with an entry that is NaN or infinite, or so large that its square is.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.isfinite(jnp.sum(wide * wide, axis=axis, keepdims=axis is not None))


def where_usable(usable: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x`, or zeros if it is not `usable`, which has its rank; `None` means that it is."""
    return x if usable is None else jnp.where(usable, x, jnp.zeros_like(x))


def usable_or_zero(x: jax.Array) -> jax.Array:
    """Matrices `(..., m, n)`, each zero if it is not usable."""
    return where_usable(is_usable(x), x)
