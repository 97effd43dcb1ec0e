"""The basis of all linear algebra here: full precision, exact scaling, matrices one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._platforms import on_gpus
from ._spread import is_shared

HIGHEST = jax.lax.Precision.HIGHEST
"""The precision of all products that feed a root or a basis."""


def inexact(x: jax.Array) -> jax.Array:
    """`x`, integers as float32, as `jax.numpy.linalg` takes them."""
    return x if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x, jnp.float32)


def magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude in `x`: not finite if an entry is not, and 0 if all are.

    One reduction, which XLA for CPUs takes from a library; `isfinite(x).all()` and `any(x != 0)`
    would be kernels to compile for each shape.
    """
    return jnp.max(jnp.abs(x))


def matrix_sums(stacks: list[jax.Array]) -> list[jax.Array]:
    """The sums `(...)` of the matrices of stacks `(..., m, n)` of one shape.

    On GPUs in one kernel, which reads once what the stacks are computed from; elsewhere each on its
    own, which XLA for TPUs fuses and which is faster on CPUs. (Devices that share matrices divide
    only the latter.)
    """
    if is_shared():
        return _one_sum_each(stacks)
    return on_gpus(_sums_at_once, _one_sum_each, stacks)


def _one_sum_each(stacks: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(x, axis=(-2, -1)) for x in stacks]


def _sums_at_once(stacks: list[jax.Array]) -> list[jax.Array]:
    def plus(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        return [x + y for x, y in zip(a, b, strict=True)]

    zeros = [jnp.zeros((), x.dtype) for x in stacks]
    return jax.lax.reduce(stacks, zeros, plus, (stacks[0].ndim - 2, stacks[0].ndim - 1))


def power_of_two(largest: jax.Array) -> jax.Array:
    """The exponent `e` (int32) for which `largest · 2^(-e)` is in [1/2, 1); 0 for 0.

    Clipped to ±126, so that `2^(-e)` is a normal float32. Arbitrary if `largest` is not finite.
    """
    return jnp.clip(jnp.frexp(largest.astype(jnp.float32))[1], -126, 126)


def one_by_one(
    f: Callable[[jax.Array], Any],
    x: jax.Array,
    at_once: Callable[[jax.Array], Any] | None = None,
) -> Any:
    """Applies `f` to each matrix of `x (..., m, n)`: on GPUs to all at once, else in one loop.

    On CPUs the decomposition of a batch (LAPACK, jaxlib 0.10) occupies one of XLA's threads while
    it waits for others. If as many batches are decomposed at once as there are threads, such as
    two shapes on two cores, they deadlock. On GPUs a loop launches its small kernels anew for each
    matrix.

    Args:
      f: maps a matrix `(m, n)` to arrays of any shapes.
      x: the matrices.
      at_once: the same for a stack, if that is traced faster than `jax.vmap(f)`.

    Returns:
      What `f` returns, with the leading axes of `x` in front.
    """
    batch = x.shape[:-2]
    in_turn = functools.partial(jax.lax.map, f)
    found = on_gpus(at_once or jax.vmap(f), in_turn, x.reshape(-1, *x.shape[-2:]))
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)


def zeros_beside(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros of another shape, on the mesh of `x`, as loops need them if its axes are Explicit.

    From JAX 0.11 on `zeros_like` drops the mesh. `x` may have leading axes, as has `shape` then.
    """
    return jnp.broadcast_to(jnp.where(False, x[..., :1, :1], 0), shape)


def significant(squares: jax.Array) -> jax.Array:
    """Which of `squares (..., n)` have roots above the rounding noise of the largest one's root.

    None if the largest is 0, or not finite.
    """
    noise = (squares.shape[-1] * jnp.finfo(squares.dtype).eps) ** 2
    return squares > noise * jnp.max(squares, axis=-1, keepdims=True)
