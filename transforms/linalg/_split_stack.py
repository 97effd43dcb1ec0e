"""Splitting a stack of matrices for the compile time of one slice.

XLA compiles equal kernels once (`docs/xla.md`, "Compile time on CPUs"), so `split_stack` makes the
kernels of slices equal: each slice is a call of one function that XLA may not inline. Its start is
behind a barrier, or XLA would make it a constant of the function.

*Cost.* At run time, one copy per slice, as for any slice. On platforms other than CPUs the slices
are plain.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from ._platforms import by_platform


def split_stack(stack: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
    """Splits `stack` into slices of `sizes` matrices, in order; `sizes` add up to its length."""
    if len(sizes) == 1:
        return (stack,)
    return by_platform(
        stack,
        cpu=functools.partial(_calls, sizes=sizes),
        default=functools.partial(lax.split, sizes=sizes),
    )


def _calls(stack: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
    starts = itertools.accumulate(sizes[:-1], initial=0)
    with set_xla_metadata(inlineable="false"):
        return [
            _slice(stack, lax.optimization_barrier(jnp.uint32(start)), size)
            for start, size in zip(starts, sizes, strict=True)
        ]


@functools.partial(jax.jit, static_argnums=2)
def _slice(stack: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(stack, start, size)
