"""Keeping gradients that are not finite out of states, and counting them.

A matrix whose sum of squares is not finite (in float32 at least) takes part in the step with a zero
gradient, and its direction is zero: momentum and statistics decay, nothing moves it, and nothing
else is affected. The same holds for every leaf of `guard_leaves`. "Finite" means that sum here: one
pass over the gradient tells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._paths import is_placeholder, named_leaves
from ._recording import record


class GuardState(NamedTuple):
    """State of `guard_matrices` and `guard_leaves`."""

    skipped: Any  # steps without a finite gradient, int32: (...) for a leaf, or (leaves,) for all
    inner: Any  # state of the inner transformation


class GuardRecord(NamedTuple):
    """What `recording` collects of `guard_leaves`: the parameters that the counters count for."""

    names: tuple[str, ...]
    skipped: jax.Array | None


def guard_matrices(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every matrix `(..., m, n)` whose gradient is not finite."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        skipped = jax.tree.map(lambda x: jnp.zeros(x.shape[:-2], jnp.int32), params)
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        finite = jax.tree.map(is_finite, updates)
        updates, inner_state = inner.update(
            where_finite(finite, updates), state.inner, params, **extra_args
        )
        skipped = jax.tree.map(lambda n, ok: n + ~ok[..., 0, 0], state.skipped, finite)
        return where_finite(finite, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def guard_leaves(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, with zeros for every leaf of any shape whose gradient is not finite."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        if is_placeholder(params):
            return GuardState(jnp.zeros(1, jnp.int32), inner.init(params))
        names = tuple(named_leaves(params).present())
        skipped = jnp.zeros(len(names), jnp.int32) if names else None
        record(GuardRecord(names, skipped))
        return GuardState(skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        finite = jax.tree.map(lambda x: is_finite(x, axis=None), updates)
        updates, inner_state = inner.update(
            where_finite(finite, updates), state.inner, params, **extra_args
        )
        flags = jax.tree.leaves(finite)
        skipped = state.skipped + ~jnp.stack(flags) if flags else state.skipped
        return where_finite(finite, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def is_finite(x: jax.Array, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Whether sums of squares over `axis` are finite: for matrices `(..., m, n)`, `(..., 1, 1)`.

    They are not with an entry that is NaN or infinite, or so large that its square is.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.isfinite(jnp.sum(wide * wide, axis=axis, keepdims=axis is not None))


def where_finite(finite: Any, tree: Any) -> Any:
    """The arrays of `tree`, zero where those of `finite`, of the same ranks, say so."""
    return jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """Matrices `(..., m, n)`, each zero if it is not finite."""
    return where_finite(is_finite(x), x)
