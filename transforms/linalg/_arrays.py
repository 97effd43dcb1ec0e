"""Arrays as each platform's compiler takes them: in memory, by rows, with and without barriers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ._platforms import by_platform


def materialized(x: jax.Array) -> jax.Array:
    """`x`, which a program for a TPU writes to memory.

    XLA for TPUs would also decode an operand of a product within the product's kernel, in every
    such kernel and for every tile. Those kernels are long and take it long to compile.
    """
    return by_platform(x, tpu=jax.lax.optimization_barrier, default=lambda x: x)


def in_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, laid out by rows in a program for a GPU.

    XLA for GPUs chooses layouts by what decompositions take, which is columns, and does so through
    loops (`docs/xla.md`, "Layouts").
    """

    def of_all(arrays: list[jax.Array]) -> list[jax.Array]:
        return [x if x.ndim < 2 else _row_major(x) for x in arrays]

    return by_platform(list(arrays), gpu=of_all, default=list)


def one_layer_in_rows(x: jax.Array) -> jax.Array:
    """`x (..., m, n)`, if it is one matrix by rows: XLA:TPU would transpose those of all layers."""
    if math.prod(x.shape[:-2]) > 1:
        return x
    return by_platform(x, tpu=_row_major, default=lambda x: x)


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def diagonals(x: jax.Array) -> jax.Array:
    """The diagonals `(..., d)` of `x (..., d, d)`, without the gather of `jnp.diagonal`.

    On TPUs as masked sums: their compiler has no room for the strided slice from order 4096 on.
    """

    def strided(x: jax.Array) -> jax.Array:
        order = x.shape[-1]
        return x.reshape(*x.shape[:-2], order * order)[..., :: order + 1]

    return by_platform(x, tpu=lambda x: jnp.einsum("...ii->...i", x), default=strided)


def zeros_beside(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros of another shape, on the mesh of `x`, as loops need them if its axes are Explicit.

    From JAX 0.11 on `zeros_like` drops the mesh. `x` may have leading axes, as has `shape` then.
    """
    return jnp.broadcast_to(jnp.where(False, x[..., :1, :1], 0), shape)
