r"""The codec: block-wise quantization of matrices to 4, 6 or 8 bits, specified to the last bit.

A matrix is split into tiles of `block × block` (smaller at the edges), each scaled by its largest
magnitude $s$. A code $j \in \{0 \dots 2^b - 1\}$ of $b$ bits stands for $s\,v_j$, with values
$v_j = n_j / T$ from a code book, integers $n_j$ that grow with $j$:

| map | $v_j$ with $k = 2j - (2^b - 1)$ |
|---|---|
| "linear2" | $k\,|k| / (2^b - 1)^2$, and 0 for $j = 2^{b-1} - 1$ |
| "linear" | $k / (2^b - 1)$ |
| "unsigned" | $((j + 1) / 2^b)^2$, for non-negative values: no code stands for 0 |

(Li et al., arXiv:2412.10663, Eqs 3 and 4.) *Encoding.* The code of an element $x$ is the number of
$j$ with $s\,(n_j + n_{j+1}) < 2T\,x$: the nearest code, and the lower one of a tie. Both products
are rounded once (after an exact scaling that keeps them in range). Nothing is divided, because
compilers replace divisions. *Decoding* gives $(n_j \cdot \tfrac 1 T) \cdot s$, each product
rounded, and exactly $\pm s$ at the ends. A tile of zeros has scale 0 and decodes to zeros.

*Dither.* With $u \in [0, 1)$ an element between two values gets the lower code if its share of the
gap is at most $u$: the code is the number of $j$ with $s\,((1 - u)\, n_j + u\, n_{j+1}) < T\,x$.
With uniform $u$ the decoded value is $x$ on average; $u = 1/2$ is the nearest code. An average that
is rounded to the nearest code after every update ignores increments below half a gap, so at decay
rates near 1 it never leaves its first codes. At step $t$ the element in row $i$ and column $j$ has

$$u_{ij}(t) = \mathrm{frac}(i\,\alpha_1 + j\,\alpha_2 + t\,\alpha_3)$$

With independent random numbers the errors of $n$ updates add up to $\sqrt n$ gaps. Multiples of an
irrational number fill [0, 1) evenly (Weyl, 1916), so successive errors of an element cancel. The
numbers are exact in 32 bits, and the same on every platform, in every batch and after a restart.

*Packing.* A byte holds two 4-bit codes of a row: column $c$ in the low half of byte $c$, column $c
+ \lceil n / 2 \rceil$ in its high half. Three bytes hold four 6-bit codes: with $q = \lceil n / 4
\rceil$, columns $c$, $c + q$ and $c + 2q$ in the low six bits of bytes $c$, $c + q$ and $c + 2q$;
the lowest, middle and highest two bits of column $c + 3q$ in their high two bits. Rows share no
byte.

*Triangles.* A strictly lower triangle of order $d$ folds into $\lceil d/2 \rceil$ rows of length
$d$. Each row $i \ge \lfloor d/2 \rfloor$ keeps its elements left of the diagonal; row $d - 1 - i$,
reversed, fills the rest. With its diagonal it is a strictly lower triangle of order $d + 1$.

*Error.* At most half the largest gap between neighboring $v_j$, times $s$: 0.1244 for 4-bit
"linear2" (the paper's Proposition B.1 states $2^{-4}$), 0.0312 for 6 bits, 0.0078 for 8 bits; twice
as much with dither. *Memory*: $b / 8$ bytes per element and one scale per tile. The input must be
finite: a NaN corrupts its tile.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._validate import OneOf, check_fields
from ..linalg._numerics import over_entries, over_tiles, tile_scales

ALPHAS = tuple(int(2**32 / 1.2207440846**power) | 1 for power in (1, 2, 3))
"""α1, α2 and α3 in units of 2^-32: powers of the inverse root of `x⁴ = x + 1` (Roberts, 2018)."""


class CodeBook(NamedTuple):
    """The values of the codes from 0 to `top`, the largest, as functions of both.

    `integers` has n_j for codes that are floats of NumPy or JAX, in the same dtype: -T and T at the
    ends, or 1 and T where all are positive, and any numbers beyond for the codes -1 and 2^b. T is
    at most 2²³, so that float32 holds the sum of two neighbors. `nearby` estimates the codes of
    numbers in units of 1/T; rounded, it is wrong by one at most.
    """

    integers: Callable[[Any, int], Any]
    nearby: Callable[[jax.Array, int], jax.Array]
    signed: bool = True  # whether it has negative values, which factors need


def _linear2(codes: Any, top: int) -> Any:
    k = 2 * codes - top
    return abs(k) * k * (codes != top // 2).astype(k.dtype)


CODE_BOOKS = {
    "linear2": CodeBook(_linear2, lambda x, top: (jnp.sign(x) * jnp.sqrt(jnp.abs(x)) + top) / 2),
    "linear": CodeBook(lambda codes, top: 2 * codes - top, lambda x, top: (x + top) / 2),
    "unsigned": CodeBook(
        lambda codes, top: (codes + 1) ** 2,
        lambda x, top: jnp.sqrt(jnp.maximum(x, 0)) - 1,
        signed=False,
    ),
}
"""By the names that `map=` takes."""

SIGNED = tuple(name for name, book in CODE_BOOKS.items() if book.signed)
"""The maps for factors."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """How matrices are quantized: bits, tile width, and the map from codes to values."""

    bits: int = 4
    block: int = 64
    map: str = "linear2"

    def __post_init__(self):
        OneOf(CODE_BOOKS).check("map", self.map)
        if self.bits not in (4, 6, 8):
            raise ValueError(f"bits must be 4, 6 or 8, got {self.bits!r}.")
        check_fields(self)
        if self.block % 2:
            raise ValueError(f"block must be even, got {self.block!r}.")

    @property
    def book(self) -> CodeBook:
        return CODE_BOOKS[self.map]

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def zero(self) -> int:
        """The code for 0, or that of the smallest value."""
        return self.top // 2 if self.book.signed else 0

    @functools.cached_property
    def unit(self) -> int:
        """T, the common denominator of the values."""
        return int(self.integers(np.float64(self.top)))

    def integers(self, codes: Any) -> Any:
        """The integers n_j of codes, see `CodeBook`."""
        return self.book.integers(codes, self.top)

    def values(self) -> np.ndarray:
        """The values v_j of all codes, ascending, in float64."""
        return np.asarray(self.integers(np.arange(2.0**self.bits))) / self.unit

    def describe(self) -> str:
        book = "" if self.map == "linear2" else f" ({self.map})"
        tiles = "" if self.block == Codec.block else f", tiles of {self.block}"
        return f"{self.bits} bits{book}{tiles}"


class Coded(NamedTuple):
    """A batch of quantized matrices."""

    codes: jax.Array  # uint8 (..., m, n) for 8 bits, (..., m, 3⌈n/4⌉) for 6, (..., m, ⌈n/2⌉) for 4
    scales: jax.Array  # (..., ⌈m/block⌉, ⌈n/block⌉)


def encode(x: jax.Array, codec: Codec, dither: jax.Array | None = None) -> Coded:
    """Quantizes `x (..., m, n)`: packed codes, and one scale per tile."""
    scales = tile_scales(x, codec.block)
    return Coded(pack(quantize(x, scales, codec, dither), codec), scales)


def decode(coded: Coded, codec: Codec, columns: int) -> jax.Array:
    """The matrices `(..., m, columns)` that `coded` stands for."""
    return dequantize(unpack(coded.codes, codec, columns), coded.scales, codec)


@functools.partial(jax.jit, static_argnums=2)
def quantize(
    x: jax.Array, scales: jax.Array, codec: Codec, dither: jax.Array | None = None
) -> jax.Array:
    """The codes of the elements of `x (..., m, n)`, uint8; `dither` is u for each of them."""
    rounded = functools.partial(_codes_of, codec=codec)
    return over_tiles(rounded, x, scales, codec.block, dither)


def _codes_of(
    x: jax.Array,
    scales: jax.Array,
    spread: Callable[[jax.Array], jax.Array],
    dither: jax.Array | None,
    codec: Codec,
) -> jax.Array:
    """The codes of the elements of `x`, whose scales are `spread(scales)`."""
    dtype, top = np.promote_types(x.dtype, np.float32), codec.top
    scales = scales.astype(dtype)
    # Exact. Elements that do not round to 0, and reciprocals of scales, stay in float32's range.
    in_range = jnp.where(scales > 1, 2.0**-20, 2.0**40).astype(dtype)
    low = scales * in_range
    in_range, low, share = map(spread, (in_range, low, 1 / (2 * low)))
    high = 2 * codec.unit * (x.astype(dtype) * in_range)

    # The estimate may be wrong by one, in either direction; the comparisons decide.
    nearby = jnp.round(jnp.clip(codec.book.nearby(high * share, top), 0, top))
    values = [codec.integers(nearby + i) for i in (-1, 0, 1)]
    codes = nearby - 1
    if dither is not None:
        dither = 2 * dither.astype(dtype) - 1
    for value, following in itertools.pairwise(values):
        threshold = value + following
        if dither is not None:
            threshold = threshold + dither * (following - value)
        codes = codes + (low * threshold < high).astype(dtype)
    codes = jnp.clip(codes, 0, top)
    return jnp.where(low > 0, codes, codec.zero).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnums=2)
def dequantize(codes: jax.Array, scales: jax.Array, codec: Codec) -> jax.Array:
    """The values of the codes `(..., m, n)`, in the dtype of the scales."""
    dtype, unit = np.promote_types(scales.dtype, np.float32), codec.unit
    integers = codec.integers(codes.astype(dtype))
    share = jnp.where(jnp.abs(integers) == unit, jnp.sign(integers), integers * (1 / unit))
    wide = over_entries(scales.astype(dtype), codec.block, codes.shape)
    return (share * wide).astype(scales.dtype)


def pack(codes: jax.Array, codec: Codec) -> jax.Array:
    """Packs the codes of each row of `(..., m, n)` into bytes, as in the module docstring."""
    if codec.bits == 8:
        return codes
    number = 2 if codec.bits == 4 else 4
    edge = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % number)]
    codes = jnp.pad(codes, edge)
    if codec.bits == 4:
        # XLA computes the codes inside a reduction; for two slices it would compute them twice.
        halves = codes.reshape(*codes.shape[:-1], 2, -1)
        high = (jnp.arange(2) == 1)[:, None]
        return jnp.sum(jnp.where(high, halves << 4, halves), axis=-2, dtype=jnp.uint8)
    *low, last = jnp.split(codes, 4, axis=-1)
    packed = [part | ((last >> 2 * i & 3) << 6) for i, part in enumerate(low)]
    return jnp.concatenate(packed, axis=-1)


def unpack(packed: jax.Array, codec: Codec, columns: int) -> jax.Array:
    """The inverse of `pack` for rows of `columns` codes."""
    if codec.bits == 8:
        return packed
    if codec.bits == 4:
        # Only bytes are joined: XLA does not fuse a concatenation with its operands' computation.
        both = jnp.concatenate([packed, packed], axis=-1)
        high = jnp.arange(both.shape[-1]) >= packed.shape[-1]
        return (jnp.where(high, both >> 4, both) & 15)[..., :columns]
    first, second, third = jnp.split(packed >> 6, 3, axis=-1)
    last = first | (second << 2) | (third << 4)
    return jnp.concatenate([packed & 63, last], axis=-1)[..., :columns]


def dither_of(count: jax.Array, rows: int, columns: int) -> jax.Array:
    """The dither at steps `count (...)`, int32, of matrices `(..., rows, columns)`; float32."""
    row, column, step = (jnp.uint32(alpha) for alpha in ALPHAS)
    i, j = (jnp.arange(size, dtype=jnp.uint32) for size in (rows, columns))
    place = i[:, None] * row + j[None, :] * column
    turn = (count.astype(jnp.uint32) * step)[..., None, None]
    turned = jnp.broadcast_to(place, (*count.shape, rows, columns)) + turn
    return (turned >> 8).astype(jnp.float32) * 2.0**-24


def strictly_lower(order: int) -> jax.Array:
    """The mask of the elements left of the diagonal, `(order, order)`."""
    return jnp.tri(order, k=-1, dtype=bool)


def fold(x: jax.Array) -> jax.Array:
    """Folds the strictly lower triangle of `x (..., d, d)` into `(..., ⌈d/2⌉, d)`."""
    order = x.shape[-1]
    turned = x[..., ::-1, ::-1]
    return jnp.where(strictly_lower(order), x, turned)[..., order // 2 :, :]


def unfold(folded: jax.Array) -> jax.Array:
    """The inverse of `fold`: `(..., d, d)`, correct below the diagonal, arbitrary elsewhere."""
    top = folded[..., ::-1, ::-1][..., : folded.shape[-1] // 2, :]
    return jnp.concatenate([top, folded], axis=-2)


def with_room(x: jax.Array) -> jax.Array:
    """A triangle with diagonal as a strictly lower one, `d + 1`; `[..., 1:, :-1]` undoes it."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 1)])


def encode_lower(x: jax.Array, codec: Codec, dither: jax.Array | None = None) -> Coded:
    """Quantizes the strictly lower triangle of `x (..., d, d)`: folded codes and folded scales."""
    lower = jnp.where(strictly_lower(x.shape[-1]), x, 0)
    scales = tile_scales(lower, codec.block)
    codes = quantize(lower, scales, codec, dither)
    return Coded(pack(fold(codes), codec), fold(with_room(scales)))


def encode_zeros(x: jax.Array, codec: Codec) -> Coded:
    """`encode_lower` of zeros of the shape of `x (..., d, d)`, in a shorter program."""
    codes = pack(jnp.full_like(fold(x), codec.zero, jnp.uint8), codec)
    return Coded(codes, fold(with_room(jnp.zeros_like(tile_scales(x, codec.block)))))


def decode_lower(coded: Any, codec: Codec, order: int) -> jax.Array:
    """The strictly lower triangle `(..., d, d)` of anything with folded codes and scales."""
    codes = unfold(unpack(coded.codes, codec, order))
    values = dequantize(codes, unfold(coded.scales)[..., 1:, :-1], codec)
    return jnp.where(strictly_lower(order), values, 0)
