"""Taking a stack of matrices apart, at the price of compiling one slice.

XLA gives every slice of a stack a kernel of its own, with whatever comes before and after the slice
in it: on CPUs 8 to 15 ms of compiling each, most of what an optimizer's update costs there. Kernels
that are the same are compiled once. Here they are: each part is a call of one function, which is
told where the part begins, and which XLA may not inline; a barrier keeps it from writing the place
into the function.

*Cost.* At run time a copy of each part, as for any slice. On everything but CPUs parts are slices:
there XLA need not run a function that it may not inline.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def split_stack(stack: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
    """Parts of `stack` with so many matrices each, in order; `sizes` add up to its length."""
    if len(sizes) == 1:
        return (stack,)
    return lax.platform_dependent(
        stack,
        cpu=functools.partial(_calls, sizes=sizes),
        default=functools.partial(lax.split, sizes=sizes),
    )


def _calls(stack: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
    starts = itertools.accumulate(sizes[:-1], initial=0)
    with set_xla_metadata(inlineable="false"):
        return [
            _part(stack, lax.optimization_barrier(jnp.uint32(start)), size)
            for start, size in zip(starts, sizes, strict=True)
        ]


@functools.partial(jax.jit, static_argnums=2)
def _part(stack: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(stack, start, size)
