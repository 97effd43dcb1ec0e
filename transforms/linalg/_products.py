"""Products of matrices: those of a step, and those of decompositions (`exact_product`).

Products with transposes are contractions, and tiles are for the time to compile (`docs/xla.md`,
"Layouts" and "TPUs"). An operation gives its products a level by the context `at`, which takes the
place of JAX's default precision in `multiplied` and `gram`, and of full precision in
`exact_product`:

| level | programs for GPUs | for TPUs |
|---|---|---|
| "float32" | float32, on ordinary units | six passes |
| "bf16x6" | six products of bfloat16 numbers | six passes |
| "bf16x3" | three | three passes |
| "bf16" | one | one pass |
| `HALVES` | as "bf16x3"; float32 where the GPU has no bfloat16 | as "bf16x3" |

`HALVES` is the default in eigenbases. Levels are presets of `jax.lax.DotAlgorithmPreset`
(`docs/xla.md`, "Presets of products"), which XLA for CPUs multiplies in float32. `HALVES` leaves it
at that there, and "bf16x6" is as accurate; "bf16x3", by two products, and "bf16" are emulated, with
the errors that they have on a GPU.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._side import Side
from .._validate import OneOf, Value, as_value
from ._loops import in_turn
from ._numerics import HIGHEST
from ._platforms import by_platform, gpus_have_bfloat16, materialized, zeros_beside

TILE = 512
"""The most rows, columns and summands of a tile."""
WHOLE = 1024
"""The most of a product that a TPU takes as it is: one kernel, which compiles faster than tiles."""
LANES = 128
"""A TPU's arrays are laid out in multiples of so many columns."""


LEVELS: dict[str, Any] = {
    "float32": HIGHEST,
    "bf16x6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16x3": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
}
HALVES = "halves"
LEVEL: Any = jax.make_user_context(None)
"""Its `value` is the level of the context."""


@dataclasses.dataclass(frozen=True)
class Products(Value):
    """See `products`."""

    step: str | None = None
    statistics: str | None = None
    refresh: str | None = None


def products(
    *, step: str | None = None, statistics: str | None = None, refresh: str | None = None
) -> Products:
    """The precision of each operation's products, for `products=`.

    A level is "float32", "bf16x6" (six products of bfloat16 numbers in the place of one, as
    accurate as float32), "bf16x3" (three) or "bf16". The name of a level in the place of this value
    gives it to all operations. Parameters in float64 have no levels. Roots by products in bf16
    diverge; `docs/performance_details.md`, "What a refresh costs", has the errors and times.

    Args:
      step: of gradients with bases or roots. `None` is JAX's default precision, which is TF32 on
        GPUs and bfloat16 on TPUs, but "float32" on the way into bases where inverses amplify its
        errors: those of roots, and of gradients that are whitened.
      statistics: of Gram products. `None` is "bf16x3" in programs for TPUs and for GPUs that have
        bfloat16 (from the A100 on), where statistics are kept in their bases, which make errors
        relative to each row. Elsewhere, and with `method="eigh"`, "qr" and stored roots, it is
        "float32".
      refresh: of rotations, roots and the moments that turn along. `None` is as for `statistics`.

    Raises:
      ValueError: if a level is none of "float32", "bf16x6", "bf16x3" and "bf16".
    """
    for name, level in (("step", step), ("statistics", statistics), ("refresh", refresh)):
        OneOf((None, *LEVELS)).check(name, level)
    return Products(step, statistics, refresh)


NAMES = {None: Products()} | {level: Products(level, level, level) for level in LEVELS}


def as_products(value: str | Products | None) -> Products:
    """The value of this name, or itself."""
    return as_value("products", value, Products, 'curvax.products(step="bf16x3")', NAMES)


def at(level: str | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which products have this level; `None` changes nothing."""
    return contextlib.nullcontext() if level is None else LEVEL(level)


def gram(
    x: jax.Array,
    side: Side,
    precision: jax.lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x xᵀ`, or `xᵀ x` on the right side, in the dtype of `x` or the given one."""
    return multiplied(x, x, precision, (side.other_axis, side.other_axis), dtype)


def multiplied(
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = None,
    sums: tuple[int, int] = (-1, -2),
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)`; or other sums, for products with transposes.

    Args:
      a: of float32, if there is a level; products of others are in full precision then.
      b: the same; of the dtype of `a` with other sums.
      precision: JAX's, or the name of a level; `None` is the level of the context.
      sums: the axes of `a` and `b` to sum over.
      dtype: of the result, with other sums; `None` is that of `a`.
    """
    form = jnp.matmul
    if sums != (-1, -2):
        batch = tuple(range(a.ndim - 2))
        dimensions = (((a.ndim + sums[0],), (b.ndim + sums[1],)), (batch, batch))
        form = functools.partial(
            jax.lax.dot_general, dimension_numbers=dimensions, preferred_element_type=dtype
        )
    precision = LEVEL.value if precision is None else precision
    if not isinstance(precision, str) or precision not in (*LEVELS, HALVES):
        return form(a, b, precision=precision)
    exactly = functools.partial(form, precision=HIGHEST)
    if not a.dtype == b.dtype == jnp.float32:
        return exactly(a, b)
    if precision == HALVES:
        halved = functools.partial(form, precision=LEVELS["bf16x3"])
        gpu = halved if gpus_have_bfloat16() else exactly
        return by_platform(gpu=gpu, tpu=halved, default=exactly)(a, b)
    leveled = functools.partial(form, precision=LEVELS[precision])
    emulated = {"bf16": _of_rounded, "bf16x3": _of_halves}.get(precision)
    if emulated is None:
        return leveled(a, b)
    return by_platform(cpu=functools.partial(emulated, exactly), default=leveled)(a, b)


def _of_rounded(exactly: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    return exactly(_rounded(a), _rounded(b))


def _of_halves(exactly: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of sums of two numbers of bfloat16, but for that of the smaller ones."""

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        low = _rounded(x - high)
        return high + low, low

    (a, c), (b, d) = halves(a), halves(b)
    return exactly(a, b) - exactly(c, d)


def _rounded(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, 8, 7)


def exact_product(a: jax.Array, b: jax.Array, *, transpose_a: bool = False) -> jax.Array:
    """`a b` for `a (..., m, k)` and `b (..., k, n)` of one dtype; `transpose_a`: `a (..., k, m)`.

    In full precision or at the level of the context; on TPUs in turn, and large ones in tiles.
    """
    exactly = functools.partial(multiplied, precision=LEVEL.value or HIGHEST)
    form = (lambda a, b: exactly(a.mT, b)) if transpose_a else exactly
    if max(*a.shape[-2:], b.shape[-1]) <= WHOLE:
        stacks = a.ndim > 2 and a.shape[:-2] == b.shape[:-2]
        return in_turn(form, a, b) if stacks else form(a, b)
    tiles = functools.partial(in_tiles, transpose_a=transpose_a)
    return by_platform(tpu=tiles, default=form)(a, b)


@jax.jit
def square_of_lower(c: jax.Array) -> jax.Array:
    """`c cᵀ` for lower triangles `c (..., d, d)` with diagonal: `d³` FLOPs, on TPUs `d³ / 3`."""
    c = materialized(c)
    with at("float32"):
        if c.shape[-1] <= TILE:
            return _by_halves(c)
        return by_platform(tpu=_mirrored, default=_by_halves)(c)


def _by_halves(c: jax.Array) -> jax.Array:
    half = c.shape[-1] // 2
    top = exact_product(c[..., :half, :half], c[..., :, :half].mT)
    bottom = exact_product(c[..., half:, :], c[..., half:, :].mT)
    below = jnp.concatenate([top[..., half:].mT, bottom], axis=-1)
    return jnp.concatenate([top, below], axis=-2)


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

    def tile(i: jax.Array, product: jax.Array) -> jax.Array:
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
            return total + multiplied(left, right, LEVEL.value or HIGHEST)

        total = jax.lax.fori_loop(0, rounds, add, zeros_beside(a, (high, wide)))
        return jax.lax.dynamic_update_slice(product, total, (row, column))

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

    def tile(i: jax.Array, product: jax.Array) -> jax.Array:
        row, column = rows[i], columns[i]

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            left, right = (
                jax.lax.dynamic_slice(c, (at, j * size), (size, size)) for at in (row, column)
            )
            if order % size:  # summands count once
                new = jnp.minimum(j * size, order - size) + jnp.arange(size) >= j * size
                left = jnp.where(new[None, :], left, 0)
            return total + multiplied(left, right.mT, LEVEL.value or HIGHEST)

        start = zeros_beside(c, (size, size))
        total = jax.lax.fori_loop(0, column // size + 1, add, start)
        product = jax.lax.dynamic_update_slice(product, total, (row, column))
        return jax.lax.dynamic_update_slice(product, total.mT, (column, row))

    return jax.lax.fori_loop(0, len(rows), tile, zeros_beside(c, c.shape))


def _tile(size: int) -> int:
    """The width of equal tiles of a side, rounded up to a TPU's 128 lanes."""
    even = -(-size // -(-size // TILE))
    return min(size, TILE, -(-even // LANES) * LANES)
