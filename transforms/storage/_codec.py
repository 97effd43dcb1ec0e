r"""Codes of few bits for matrices: block-wise quantization, bit by bit.

A matrix is cut into tiles of `block × block` (those at the edges are smaller), each scaled by its
largest magnitude $s$. With $b$ bits a code $j \in \{0 \dots 2^b - 1\}$ stands for $s\,v_j$:

| map | $v_j$ with $k = 2j - (2^b - 1)$ |
|---|---|
| "linear2" | $k\,|k| / (2^b - 1)^2$, and 0 for $j = 2^{b-1} - 1$ |
| "linear" | $k / (2^b - 1)$ |
| "unsigned" | $((j + 1) / 2^b)^2$, for what is not negative: 0 has no code |

(Li et al., arXiv:2412.10663, Eqs 3 and 4.) With $v_j = n_j / T$ in integers, an element $x$ takes
as many codes up from 0 as there are neighbors with $s\,(n_j + n_{j+1}) < 2T\,x$: the nearest, and
of two that are equally near the lower. Both products are rounded once (after an exact scaling that
keeps them in range), and nothing is divided, since compilers replace divisions. Decoding gives
$(n_j \cdot \tfrac 1 T) \cdot s$, each product rounded, and exactly $\pm s$ at the ends. A tile of
zeros has scale 0 and decodes to zeros. Four-bit codes of a row lie two in a byte: column $c$ in the
low half of byte $c$, column $c + \lceil n / 2 \rceil$ in its high half; rows share no byte.

*Error.* At most half the largest gap between neighboring $v_j$, times $s$: 0.1244 for 4-bit
"linear2" (not $2^{-4}$, as the paper's Proposition B.1 has it), 0.0078 for 8 bits. *Cost* in
memory: $b / 8$ bytes an element and one scale for a tile. What is not finite must not come here: a
NaN spoils its tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._validate import check_choice, check_positive_int

BITS = (4, 8)
MAPS = ("linear2", "linear", "unsigned")


@dataclasses.dataclass(frozen=True)
class Codec:
    """How matrices become codes: bits, width of a tile, and the map from codes to numbers."""

    bits: int = 4
    block: int = 64
    map: str = "linear2"

    def __post_init__(self):
        """Checks the arguments."""
        if self.bits not in BITS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}.")
        check_positive_int("block", self.block)
        if self.block % 2:
            raise ValueError(f"block must be even, got {self.block!r}.")
        check_choice("map", self.map, MAPS)

    @property
    def zero(self) -> int:
        """The code that stands for 0 in the maps that have one."""
        return 2 ** (self.bits - 1) - 1

    @property
    def unit(self) -> int:
        """T, by which the codes' integers are divided."""
        top = 2**self.bits - 1
        return {"linear2": top**2, "linear": top, "unsigned": (top + 1) ** 2}[self.map]

    def integers(self, codes: Any) -> Any:
        """The integers n_j for which the codes stand, exact in any float; codes as floats."""
        top = 2**self.bits - 1
        if self.map == "unsigned":
            return (codes + 1) ** 2
        k = 2 * codes - top
        if self.map == "linear":
            return k
        return abs(k) * k * (codes != self.zero)

    def values(self) -> np.ndarray:
        """The numbers that the codes stand for, ascending, in float64."""
        return self.integers(np.arange(2.0**self.bits)) / self.unit


class Coded(NamedTuple):
    """A batch of matrices in codes."""

    codes: jax.Array  # uint8 (..., m, n) for 8 bits, (..., m, ⌈n/2⌉) for 4
    scales: jax.Array  # (..., ⌈m/block⌉, ⌈n/block⌉)


def encode(x: jax.Array, codec: Codec) -> Coded:
    """The codes of `x (..., m, n)`, packed, with the scales of their tiles."""
    scales = tile_scales(x, codec.block)
    return Coded(pack(quantize(x, scales, codec), codec), scales)


def decode(coded: Coded, codec: Codec, columns: int) -> jax.Array:
    """The matrices `(..., m, columns)` that the codes stand for."""
    return dequantize(unpack(coded.codes, codec, columns), coded.scales, codec)


def tile_scales(x: jax.Array, block: int) -> jax.Array:
    """The largest magnitude in every tile of `x (..., m, n)`."""
    m, n = x.shape[-2:]
    edges = [(0, 0)] * (x.ndim - 2) + [(0, -m % block), (0, -n % block)]
    padded = jnp.pad(jnp.abs(x), edges)
    rows, columns = padded.shape[-2] // block, padded.shape[-1] // block
    return jnp.max(padded.reshape(*x.shape[:-2], rows, block, columns, block), axis=(-3, -1))


def spread(scales: jax.Array, block: int, m: int, n: int) -> jax.Array:
    """Every tile's scale at every place of the tile, `(..., m, n)`."""
    *batch, rows, columns = scales.shape
    wide = jnp.broadcast_to(scales[..., :, None, :, None], (*batch, rows, block, columns, block))
    return wide.reshape(*batch, rows * block, columns * block)[..., :m, :n]


def quantize(x: jax.Array, scales: jax.Array, codec: Codec) -> jax.Array:
    """The code, uint8, of every element of `x (..., m, n)`."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    scales = scales.astype(dtype)
    # Exact, and far above what is subnormal for every element that does not round to 0.
    in_range = jnp.where(scales > 1, 2.0**-20, 1.0).astype(dtype)
    low = spread(scales * in_range, codec.block, *x.shape[-2:])
    high = 2 * codec.unit * (x.astype(dtype) * spread(in_range, codec.block, *x.shape[-2:]))
    codes = jnp.zeros(x.shape, dtype)
    for bit in reversed(range(codec.bits)):  # a binary search among the midpoints
        higher = codes + 2**bit
        midpoint = codec.integers(higher - 1) + codec.integers(higher)
        codes = jnp.where(low * midpoint < high, higher, codes)
    nothing = 0 if codec.map == "unsigned" else codec.zero
    return jnp.where(low > 0, codes, nothing).astype(jnp.uint8)


def dequantize(codes: jax.Array, scales: jax.Array, codec: Codec) -> jax.Array:
    """The number that every code `(..., m, n)` stands for, in the dtype of the scales."""
    dtype = jnp.promote_types(scales.dtype, jnp.float32)
    integers = codec.integers(codes.astype(dtype))
    share = jnp.where(
        jnp.abs(integers) == codec.unit, jnp.sign(integers), integers * (1 / codec.unit)
    )
    return (share * spread(scales.astype(dtype), codec.block, *codes.shape[-2:])).astype(
        scales.dtype
    )


def pack(codes: jax.Array, codec: Codec) -> jax.Array:
    """Two 4-bit codes to a byte: `(..., m, n)` becomes `(..., m, ⌈n/2⌉)`."""
    if codec.bits == 8:
        return codes
    half = -(-codes.shape[-1] // 2)
    low, high = codes[..., :half], codes[..., half:]
    high = jnp.pad(high, [(0, 0)] * (codes.ndim - 1) + [(0, half - high.shape[-1])])
    return low | (high << 4)


def unpack(packed: jax.Array, codec: Codec, columns: int) -> jax.Array:
    """Undoes `pack` for rows of `columns` codes."""
    if codec.bits == 8:
        return packed
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)[..., :columns]
