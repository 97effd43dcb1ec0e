"""The basis of all linear algebra: precision, exact scaling, rounding noise, norms, and tiles."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._trees import widened
from ._platforms import by_platform, materialized

HIGHEST = jax.lax.Precision.HIGHEST
"""The precision of products that feed a root or a basis, where no level is given."""

EIGENVALUE_NOISE = 8.0
"""An eigenvalue of a symmetric matrix up to this multiple of `eps · d_max` is rounding noise: ten
times that of the zero eigenvalues of float32 averages of rank 1 to n/4, of orders 16 to 512."""

RESOLVED = 2.0
"""Damping above this multiple of `eps · d_max` is not noise: rounding moves eigenvalues by 0.7."""

TWO_SCALES = (2.0**51, 2.0**-40)
"""Multiples of the entries in two sums: the first is finite for norms below 2^13."""


@jax.jit
def declared(choices: jax.Array) -> jax.Array:
    """Flags or indices of matrices that only choose the order or form of work, not its results."""
    # `layerwise` refuses every other number that depends on all layers.
    return choices


def inexact(x: jax.Array) -> jax.Array:
    """`x`, integers as float32, as `jax.numpy.linalg` takes them."""
    return x if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x, jnp.float32)


@jax.custom_jvp
def safe_root(x: jax.Array) -> jax.Array:
    """The square root, with a derivative of 0 at 0."""
    return jnp.sqrt(x)


@safe_root.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    root = safe_root(*primals)
    zero = root == 0  # not if it is NaN
    return root, jnp.where(zero, 0, tangents[0] / jnp.where(zero, 1, 2 * root))


def safe_norm(
    x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False
) -> jax.Array:
    """The norm of `x` along axes, with a derivative of 0 at 0."""
    return safe_root(jnp.sum(x * x, axis=axis, keepdims=keepdims))


def magnitude(
    x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False
) -> jax.Array:
    """The largest magnitude in `x`, or along `axis`: not finite if an entry is not."""
    # By bit patterns, where NaN is above infinity (`docs/xla.md`, "Maxima on CPUs").
    wide = widened(jnp.abs(x))
    bits = jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    largest = jnp.max(bits, axis=axis, keepdims=keepdims)
    return jax.lax.bitcast_convert_type(largest, wide.dtype).astype(x.dtype)


def power_of_two(largest: jax.Array) -> jax.Array:
    """The exponent `e`, int32, with `largest · 2^(-e)` in [1/2, 1), up to ±126; 0 for 0."""
    return jnp.clip(jnp.frexp(largest.astype(jnp.float32))[1], -126, 126)


def to_one(largest: jax.Array) -> jax.Array:
    """`2^(-e)` with the exponent of `power_of_two`, by which products are exact."""
    return jnp.ldexp(jnp.ones_like(largest), -power_of_two(largest))


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, and 0 where `b` is not positive."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def divided(a: jax.typing.ArrayLike, b: jax.Array) -> jax.Array:
    """`a / b`, and 0 where `b` is 0; NaN where `b` is NaN."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def inner_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Those of the matrices of `x` and `y (..., m, n)`: `(..., 1, 1)`."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def significant(squares: jax.Array) -> jax.Array:
    """Which roots of `squares (..., n)` exceed the rounding noise of a finite largest one."""
    noise = (squares.shape[-1] * jnp.finfo(squares.dtype).eps) ** 2
    return squares > noise * jnp.max(squares, axis=-1, keepdims=True)


def norms(x: jax.Array) -> jax.Array:
    """The norms `(..., 1, 1)` of `x (..., m, n)`, in float32 at least.

    From sums of squares at two scales, of which one neither underflows nor overflows for entries
    from 1e-30 to 1e30; on CPUs from one sum if it is in range: each would compute `x` anew.
    """

    def usual(x: jax.Array) -> jax.Array:
        norm = safe_root(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
        in_range = jnp.all(declared((norm > 2.0**-30) & (norm < 2.0**60)))
        return jax.lax.cond(in_range, lambda x: norm, _at_two_scales, x)

    at_once = functools.partial(_at_two_scales, at_once=True)
    return by_platform(gpu=at_once, tpu=_at_two_scales, default=usual)(widened(x))


def _at_two_scales(x: jax.Array, *, at_once: bool = False) -> jax.Array:
    """`norms` from both sums; `at_once`: in one kernel of a GPU, which reads `x` once."""
    squares = [jnp.square(x * scale) for scale in TWO_SCALES]
    if at_once:
        plus = functools.partial(jax.tree.map, operator.add)
        zeros = [jnp.zeros((), x.dtype) for _ in squares]
        sums = jax.lax.reduce(squares, zeros, plus, (x.ndim - 2, x.ndim - 1))
    else:
        sums = [jnp.sum(y, axis=(-2, -1)) for y in squares]
    roots = (safe_root(x) / scale for x, scale in zip(sums, TWO_SCALES, strict=True))
    of_small, of_large = (root[..., None, None] for root in roots)
    return jnp.where(of_small < 2.0**11, of_small, of_large)


def rescaled(x: jax.Array, like: jax.Array) -> jax.Array:
    """Rescales each matrix of `x (..., m, n)` to the norm of its match in `like`; 0 stays 0."""
    norm = norms(x)
    return (x.astype(norm.dtype) * ratio(norms(like), norm)).astype(x.dtype)


def shortened(x: jax.Array, longest: jax.typing.ArrayLike) -> jax.Array:
    """Rescales the matrices of `x (..., m, n)` that are longer than `longest (...)` to it."""
    norm = norms(x)
    longest = jnp.broadcast_to(longest, x.shape[:-2])[..., None, None].astype(norm.dtype)
    long = norm > longest
    # Where it is not, neither an infinite `longest` nor a norm of 0 has a part in derivatives.
    factor = jnp.where(long, longest / jnp.where(long, norm, 1), 1)
    return (x.astype(norm.dtype) * factor).astype(x.dtype)


def tile_scales(x: jax.Array, block: int) -> jax.Array:
    """The largest magnitude `(..., ⌈m/b⌉, ⌈n/b⌉)` in each tile of `x (..., m, n)`."""
    *batch, _, n = x.shape
    wide = max(min(block, n), 1)
    columns = jnp.max(_bands(jnp.abs(x), block), axis=-2)
    columns = jnp.pad(columns, [(0, 0)] * (columns.ndim - 1) + [(0, -n % wide)])
    return jnp.max(columns.reshape(*batch, -1, columns.shape[-1] // wide, wide), axis=-1)


def over_tiles(
    f: Callable[..., jax.Array],
    x: jax.Array,
    numbers: jax.Array,
    block: int,
    others: jax.Array | None = None,
) -> jax.Array:
    """`f(x, numbers, spread, others)`, which is elementwise in `x (..., m, n)` and the `others`.

    `spread` gives each entry the number `(..., ⌈m/b⌉, ⌈n/b⌉)` of its tile.
    """
    *batch, m, n = x.shape

    def in_bands(x: jax.Array, numbers: jax.Array, others: jax.Array | None) -> jax.Array:
        spread = lambda numbers: jnp.repeat(numbers, block, axis=-1)[..., None, :n]  # noqa: E731
        others = None if others is None else _bands(others, block)
        mapped = f(materialized(_bands(x, block)), numbers, spread, others)
        return mapped.reshape(*batch, -1, n)[..., :m, :]

    spread = functools.partial(over_entries, block=block, shape=x.shape)
    at_once = lambda x, numbers, others: f(x, numbers, spread, others)  # noqa: E731
    return by_platform(tpu=in_bands, default=at_once)(x, numbers, others)


def over_entries(numbers: jax.Array, block: int, shape: tuple[int, ...]) -> jax.Array:
    """The numbers `(..., ⌈m/b⌉, ⌈n/b⌉)` of tiles for the entries of matrices of this shape."""
    *batch, m, n = shape
    wide = jnp.repeat(numbers, block, axis=-1)[..., None, :n]
    rows = wide.shape[-3], max(min(block, m), 1)
    bands = jnp.broadcast_to(wide, (*batch, *rows, n))
    return bands.reshape(*batch, rows[0] * rows[1], n)[..., :m, :]


def _bands(x: jax.Array, block: int) -> jax.Array:
    """The rows of `x (..., m, n)` in bands of tiles, padded with zeros: `(..., ⌈m/b⌉, b, n)`."""
    *batch, m, n = x.shape
    high = max(min(block, m), 1)
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -m % high), (0, 0)])
    return x.reshape(*batch, x.shape[-2] // high, high, n)
