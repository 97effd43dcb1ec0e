"""Guards: keep non-finite gradients out of states and non-finite directions out of updates.

A matrix counts as finite if its sum of squares, in float32 at least, is finite: one pass over the
gradient decides. A matrix that is not finite takes part in the step with a zero gradient, and its
direction is zero: its momentum and statistics decay, it does not move, and nothing else is
affected. `guard_leaves` treats leaves of any shape in the same way.

If the gradient is finite and the direction is not, the state of the matrix is damaged:
the direction is zero, and `guard_matrices` starts the state anew at the next step (`_restart.py`).
One pass over the direction decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._counts import counters
from ._paths import is_placeholder, named_leaves
from ._recording import PerParameter, record
from ._restart import flagged, restarted


@counters
class GuardCounts(NamedTuple):
    """The counters of `guard_matrices`."""

    value: Any
    names = ("skipped", "restarted", "damaged")
    # Steps with a non-finite gradient; how often the state started anew; 1 if it will at this step.


class MatrixGuardState(NamedTuple):
    """State of `guard_matrices`."""

    counts: GuardCounts
    inner: Any  # state of the inner transformation


class GuardState(NamedTuple):
    """State of `guard_leaves`."""

    skipped: Any  # steps with a non-finite gradient, int32 (leaves,)
    inner: Any  # state of the inner transformation


def guard_matrices(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on an array `(..., m, n)`, with zeros for each matrix that is not finite.

    A matrix whose direction is not finite starts anew.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return MatrixGuardState(GuardCounts.zeros(params.shape[:-2]), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        finite = is_finite(updates)
        like = updates if params is None else params
        before = restarted(inner.init, flagged(state.counts), state.inner, like)
        gradient = where_finite(finite, updates)
        found: Any = inner.update(gradient, before, params, **extra_args)
        direction, new = found
        damaged = ~all_finite(direction)
        sound = finite & ~damaged[..., None, None]
        counts = state.counts.plus(skipped=~finite[..., 0, 0], **state.counts.flags(damaged))
        return where_finite(sound, direction), MatrixGuardState(counts, new)

    return optax.GradientTransformationExtraArgs(init, update)


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
        updates, inner_state = inner.update(
            where_finite(finite, updates), state.inner, params, **extra_args
        )
        flags = jax.tree.leaves(finite)
        skipped = state.skipped
        if flags:
            skipped = skipped + (~jnp.stack(flags)).astype(jnp.int32)
        return where_finite(finite, updates), GuardState(skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def is_finite(x: jax.Array, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Whether sums of squares over `axis` are finite: `(..., 1, 1)` for matrices `(..., m, n)`.

    They are not if an entry is NaN or infinite, or so large that its square overflows.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.isfinite(jnp.sum(wide * wide, axis=axis, keepdims=axis is not None))


def all_finite(x: jax.Array) -> jax.Array:
    """Whether all entries of matrices `(..., m, n)` are finite, bool `(...)`.

    Their sum decides, which on a CPU takes a quarter of the time of looking at each of them.
    """
    return jnp.isfinite(jnp.sum(x, axis=(-2, -1), dtype=jnp.promote_types(x.dtype, jnp.float32)))


def where_finite(finite: Any, tree: Any) -> Any:
    """The arrays of `tree`, zero where `finite`, whose arrays have the same ranks, is False."""
    return jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """The matrices `x (..., m, n)`, with zeros in place of each that is not finite."""
    return where_finite(is_finite(x), x)
