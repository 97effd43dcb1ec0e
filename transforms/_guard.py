"""Keeping gradients that would poison a state out of it, and counting them.

A matrix whose sum of squares is not finite (in float32 at least) takes part in the step with a zero
gradient, and its direction is zero: momentum and statistics decay, nothing moves it, and nothing
else is affected. The same holds for every leaf of `guard_leaves`. One pass over the gradient tells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._finite import is_usable
from ._paths import named_leaves
from ._placeholder import is_placeholder
from ._recording import record


class GuardState(NamedTuple):
    """State of `guard_matrices` and `guard_leaves`."""

    skipped: Any  # steps without a usable gradient, int32: (...) for a leaf, or (leaves,) for all
    inner: Any  # state of the inner transformation


class GuardRecord(NamedTuple):
    """What `recording` collects of `guard_leaves`: the parameters that the counters count for."""

    names: tuple[str, ...]
    skipped: jax.Array | None


def guard_matrices(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every matrix `(..., m, n)` whose gradient is not usable."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        skipped = jax.tree.map(lambda x: jnp.zeros(x.shape[:-2], jnp.int32), params)
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        usable = jax.tree.map(is_usable, updates)
        updates = jax.tree.map(_where, usable, updates)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        skipped = jax.tree.map(lambda n, u: n + ~u[..., 0, 0], state.skipped, usable)
        return jax.tree.map(_where, usable, updates), GuardState(skipped, inner_state)

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
        updates = jax.tree.map(_where, usable, updates)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        flags = jax.tree.leaves(usable)
        skipped = state.skipped + ~jnp.stack(flags) if flags else state.skipped
        return jax.tree.map(_where, usable, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _where(usable: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(usable, x, jnp.zeros_like(x))
