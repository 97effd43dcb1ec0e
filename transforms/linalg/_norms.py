"""Frobenius norms of matrices with entries of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ._platforms import by_platform

TWO_SCALES = (2.0**51, 2.0**-40)
"""Multiples of the entries in two sums: the first is finite for norms below 2^13."""


def norms(x: jax.Array) -> jax.Array:
    """The norms `(..., 1, 1)` of `x (..., m, n)`, in float32 at least.

    They come from sums of squares at two scales; one of these neither underflows nor overflows for
    entries from 1e-30 to 1e30. On CPUs they come from one sum, if its squares are in range: XLA for
    CPUs computes `x` anew for each sum.
    """
    work = x.astype(np.promote_types(x.dtype, np.float32))

    def usual(x: jax.Array) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
        in_range = jnp.all((norm > 2.0**-30) & (norm < 2.0**60))
        return jax.lax.cond(in_range, lambda x: norm, _at_two_scales, x)

    at_once = functools.partial(_at_two_scales, sums=_sums_at_once)
    return by_platform(work, gpu=at_once, tpu=_at_two_scales, default=usual)


def _sums_one_each(stacks: list[jax.Array]) -> list[jax.Array]:
    """The sums `(...)` of the matrices of stacks `(..., m, n)` of one shape.

    XLA for TPUs fuses them, and this is faster on CPUs.
    """
    return [jnp.sum(x, axis=(-2, -1)) for x in stacks]


def _sums_at_once(stacks: list[jax.Array]) -> list[jax.Array]:
    """The same in one kernel, which reads the inputs of the stacks once."""

    def plus(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        return [x + y for x, y in zip(a, b, strict=True)]

    zeros = [jnp.zeros((), x.dtype) for x in stacks]
    return jax.lax.reduce(stacks, zeros, plus, (stacks[0].ndim - 2, stacks[0].ndim - 1))


def _at_two_scales(
    x: jax.Array, sums: Callable[[list[jax.Array]], list[jax.Array]] = _sums_one_each
) -> jax.Array:
    scaled = [jnp.sqrt(found) for found in sums([jnp.square(x * scale) for scale in TWO_SCALES])]
    of_small, of_large = (
        (root / scale)[..., None, None] for root, scale in zip(scaled, TWO_SCALES, strict=True)
    )
    return jnp.where(of_small < 2.0**11, of_small, of_large)
