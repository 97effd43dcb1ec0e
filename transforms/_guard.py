"""Keeping gradients that would poison a state out of it, and counting them.

A matrix whose sum of squares is not finite (in float32 at least) takes part in the step with a zero
gradient: momentum decays and goes on moving it, statistics decay, and nothing else is affected. The
same holds for every leaf of `guard_leaves`. One pass over the gradient tells.
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
from ._trees import map_unzip


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
        def sound(g: jax.Array, skipped: jax.Array) -> tuple[jax.Array, jax.Array]:
            usable = is_usable(g)
            return jnp.where(usable, g, jnp.zeros_like(g)), skipped + ~usable[..., 0, 0]

        updates, skipped = map_unzip(2, sound, updates, state.skipped)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        return updates, GuardState(skipped, inner_state)

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
        leaves, treedef = jax.tree.flatten(updates)
        usable = [is_usable(x, axis=None) for x in leaves]
        sound = [jnp.where(u, x, jnp.zeros_like(x)) for u, x in zip(usable, leaves, strict=True)]
        skipped = state.skipped + ~jnp.stack(usable) if leaves else state.skipped
        updates, inner_state = inner.update(
            treedef.unflatten(sound), state.inner, params, **extra_args
        )
        return updates, GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
