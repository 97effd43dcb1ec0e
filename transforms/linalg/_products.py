"""Products of matrices: those of a step, and those of decompositions.

| | precision | a stack on a TPU | a large one on a TPU |
|---|---|---|---|
| `product`, `gram` | as given | one matrix after the other | as it is |
| `exact_product` | full | one matrix after the other | in tiles |

A level of `_precision.py`, as the context has it, takes the place of JAX's default precision in
`product` and `gram`, and of full precision in `exact_product`.

XLA folds `.mT` into a product of two matrices, but not into a product of two batches of one matrix:
on a CPU it first writes out the transpose, which takes a quarter of the time of `x @ x.mT`. So
products with transposes are contractions here. In `Precision.HIGHEST` XLA takes ten times as long
to compile a large product for a TPU as one in tiles (`docs/xla.md`). Products of triangles leave
out tiles of zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._side import Side
from ._loops import in_turn
from ._numerics import HIGHEST
from ._platforms import by_platform, zeros_beside
from ._precision import LEVELS, in_full, level_here

TILE = 512
"""The most rows, columns and summands of a tile."""
WHOLE = 1024
"""The most of a product that a TPU takes as it is: one kernel, which compiles faster than tiles."""
LANES = 128
"""A TPU's arrays are laid out in multiples of so many columns."""


def product(
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)`; of one dtype if one is transposed.

    `transpose_a`: `aᵀ b` for `a (..., k, m)`; `transpose_b`: `a bᵀ` for `b (..., n, k)`.
    """
    if not transpose_a and not transpose_b:
        return in_turn(functools.partial(multiplied, jnp.matmul, precision=precision), a, b)
    return _contracted(a, b, -2 if transpose_a else -1, -1 if transpose_b else -2, precision)


def gram(
    x: jax.Array,
    side: Side,
    precision: jax.lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x xᵀ`, or `xᵀ x` on the right side, in the dtype of `x` or the given one."""
    axis = side.other_axis
    return _contracted(x, x, axis, axis, precision, dtype)


def _contracted(
    a: jax.Array,
    b: jax.Array,
    axis_a: int,
    axis_b: int,
    precision: jax.lax.PrecisionLike,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The product that sums over an axis of each."""

    def contracted(a: jax.Array, b: jax.Array, *, precision: jax.lax.PrecisionLike) -> jax.Array:
        batch = tuple(range(a.ndim - 2))
        dimensions = (((a.ndim + axis_a,), (b.ndim + axis_b,)), (batch, batch))
        return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=dtype)

    return in_turn(functools.partial(multiplied, contracted, precision=precision), a, b)


def multiplied(
    form: Callable[..., jax.Array],
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`form(a, b, precision=precision)`, a product.

    Args:
      form: one of JAX's.
      a: of float32, if there is a level; products of others are in full precision then.
      b: the same.
      precision: JAX's, or the name of a level; `None` is the level of the context.
    """
    precision = level_here() if precision is None else precision
    if not isinstance(precision, str) or precision not in LEVELS:
        return form(a, b, precision=precision)
    if not a.dtype == b.dtype == jnp.float32:
        return form(a, b, precision=HIGHEST)
    leveled = functools.partial(form, precision=LEVELS[precision])
    on_cpus = {"bf16": _of_rounded, "bf16x3": _of_halves}.get(precision)
    if on_cpus is None:
        return leveled(a, b)
    return by_platform(a, b, cpu=functools.partial(on_cpus, form), default=leveled)


def _of_rounded(form: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of numbers of bfloat16."""
    return form(_rounded(a), _rounded(b), precision=HIGHEST)


def _of_halves(form: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of sums of two numbers of bfloat16, but for that of the smaller ones."""

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        low = _rounded(x - high)
        return high + low, low

    (a, c), (b, d) = halves(a), halves(b)
    return form(a, b, precision=HIGHEST) - form(c, d, precision=HIGHEST)


def _rounded(x: jax.Array) -> jax.Array:
    """To bfloat16."""
    return jax.lax.reduce_precision(x, 8, 7)


def exact_product(a: jax.Array, b: jax.Array, *, transpose_a: bool = False) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)` of one dtype; `transpose_a`: `a (..., k, m)`.

    For products that feed a root or a basis, in full precision or at the level of the context.
    `transpose_a` takes no memory on a TPU; `a.mT` would.
    """
    form = functools.partial(_whole, transpose_a=transpose_a)
    if max(*a.shape[-2:], b.shape[-1]) <= WHOLE:
        return in_turn(form, a, b) if a.shape[:-2] == b.shape[:-2] else form(a, b)
    return by_platform(a, b, tpu=functools.partial(in_tiles, transpose_a=transpose_a), default=form)


@in_full
def square_of_lower(c: jax.Array) -> jax.Array:
    """`c cᵀ` for lower triangles `c (..., d, d)` with diagonal: `d³` FLOPs, on TPUs `d³ / 3`."""
    if c.shape[-1] <= TILE:
        return _by_halves(c)
    return by_platform(c, tpu=_mirrored, default=_by_halves)


def _by_halves(c: jax.Array) -> jax.Array:
    half = c.shape[-1] // 2
    top = exact_product(c[..., :half, :half], c[..., :, :half].mT)
    bottom = exact_product(c[..., half:, :], c[..., half:, :].mT)
    below = jnp.concatenate([top[..., half:].mT, bottom], axis=-1)
    return jnp.concatenate([top, below], axis=-2)


def _whole(a: jax.Array, b: jax.Array, *, transpose_a: bool = False) -> jax.Array:
    return multiplied(jnp.matmul, a.mT if transpose_a else a, b, level_here() or HIGHEST)


@functools.partial(jax.jit, static_argnames="transpose_a")
def in_tiles(a: jax.Array, b: jax.Array, *, transpose_a: bool = False) -> jax.Array:
    """`a b`, or `aᵀ b`, tile by tile."""
    if max(a.ndim, b.ndim) > 2:
        one = functools.partial(in_tiles, transpose_a=transpose_a)
        signature = "(k,m),(k,n)->(m,n)" if transpose_a else "(m,k),(k,n)->(m,n)"
        return jnp.vectorize(one, signature=signature)(a, b)
    k, n = b.shape
    m = a.shape[1 if transpose_a else 0]
    high, deep, wide = map(_tile, (m, k, n))
    across, rounds = -(-n // wide), -(-k // deep)

    def tile(i: jax.Array, found: jax.Array) -> jax.Array:
        # The last tile of a row or column begins where it fits (`dynamic_slice` sees to that), and
        # has some entries a second time. Padding would copy both matrices.
        row, column = i // across * high, i % across * wide

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            if transpose_a:
                left = jax.lax.dynamic_slice(a, (j * deep, row), (deep, high)).mT
            else:
                left = jax.lax.dynamic_slice(a, (row, j * deep), (high, deep))
            right = jax.lax.dynamic_slice(b, (j * deep, column), (deep, wide))
            if k % deep:  # summands count once
                new = jnp.minimum(j * deep, k - deep) + jnp.arange(deep) >= j * deep
                left = jnp.where(new[None, :], left, 0)
                right = jnp.where(new[:, None], right, 0)
            return total + _whole(left, right)

        total = jax.lax.fori_loop(0, rounds, add, zeros_beside(a, (high, wide)))
        return jax.lax.dynamic_update_slice(found, total, (row, column))

    return jax.lax.fori_loop(0, -(-m // high) * across, tile, zeros_beside(a, (m, n)))


@jax.jit
def _mirrored(c: jax.Array) -> jax.Array:
    """The tiles of `c cᵀ` on and below the diagonal, and these transposed above it."""
    if c.ndim > 2:
        return jnp.vectorize(_mirrored, signature="(n,n)->(n,n)")(c)
    order = c.shape[-1]
    size = _tile(order)
    lower = np.tril_indices(-(-order // size))
    rows, columns = (jnp.asarray(index * size, jnp.int32) for index in lower)

    def tile(i: jax.Array, found: jax.Array) -> jax.Array:
        row, column = rows[i], columns[i]

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            left, right = (
                jax.lax.dynamic_slice(c, (at, j * size), (size, size)) for at in (row, column)
            )
            if order % size:  # summands count once
                new = jnp.minimum(j * size, order - size) + jnp.arange(size) >= j * size
                left = jnp.where(new[None, :], left, 0)
            return total + _whole(left, right.mT)

        start = zeros_beside(c, (size, size))
        total = jax.lax.fori_loop(0, column // size + 1, add, start)
        found = jax.lax.dynamic_update_slice(found, total, (row, column))
        return jax.lax.dynamic_update_slice(found, total.mT, (column, row))

    return jax.lax.fori_loop(0, len(rows), tile, zeros_beside(c, c.shape))


def _tile(size: int) -> int:
    """As wide as others of the same side, as nearly as a TPU's layout allows."""
    even = -(-size // -(-size // TILE))
    return min(size, TILE, -(-even // LANES) * LANES)
