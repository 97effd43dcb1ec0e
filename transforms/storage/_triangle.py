r"""Triangles in squares: one strictly lower triangle in half a square, or two in one square.

A strictly lower triangle of order $d$ folds into $\lceil d/2 \rceil$ rows of length $d$. Each row
$i \ge \lfloor d/2 \rfloor$ keeps its elements left of the diagonal; row $d - 1 - i$, reversed,
fills the rest. Two strictly lower triangles share a square, the second one transposed. A lower
triangle with its diagonal is a strictly lower triangle of order $d + 1$.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..linalg._platforms import materialized
from ..linalg._products import square_of_lower
from ..linalg._tile_values import tile_scales
from ._codec import Codec, Coded, dequantize, pack, quantize, unpack


def strictly_lower(order: int) -> jax.Array:
    """The mask of the elements left of the diagonal, `(order, order)`."""
    return jnp.tri(order, k=-1, dtype=bool)


def strictly_upper(order: int) -> jax.Array:
    """The mask of the elements right of the diagonal, `(order, order)`."""
    place = jnp.arange(order)
    return place[:, None] < place[None]


def fold(x: jax.Array) -> jax.Array:
    """Folds the strictly lower triangle of `x (..., d, d)` into `(..., ⌈d/2⌉, d)`."""
    order = x.shape[-1]
    turned = x[..., ::-1, ::-1]
    return jnp.where(strictly_lower(order), x, turned)[..., order // 2 :, :]


def unfold(folded: jax.Array) -> jax.Array:
    """The inverse of `fold`: `(..., d, d)`, correct below the diagonal, arbitrary elsewhere."""
    top = folded[..., ::-1, ::-1][..., : folded.shape[-1] // 2, :]
    return jnp.concatenate([top, folded], axis=-2)


def join(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Two strictly lower triangles `(..., d, d)` in one square, `upper` transposed.

    To undo it, read below the diagonal of the square and of its transpose.
    """
    return jnp.where(strictly_lower(lower.shape[-1]), lower, upper.mT)


def with_room(x: jax.Array) -> jax.Array:
    """A lower triangle `(..., d, d)` with diagonal, as a strictly lower one of order `d + 1`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 1)])


def without_room(x: jax.Array) -> jax.Array:
    """The inverse of `with_room`: correct on and below the diagonal, arbitrary above."""
    return x[..., 1:, :-1]


def with_diagonal(x: jax.Array, diagonal: jax.Array) -> jax.Array:
    """`x (..., d, d)` with another diagonal `(..., d)`."""
    return jnp.where(jnp.eye(x.shape[-1], dtype=bool), diagonal[..., None], x)


@jax.jit
def squared(c: jax.Array) -> jax.Array:
    """`c cᵀ` for lower triangles `c (..., d, d)` with diagonal."""
    return square_of_lower(materialized(c))


def encode_lower(x: jax.Array, codec: Codec, dither: jax.Array | None = None) -> Coded:
    """Quantizes the strictly lower triangle of `x (..., d, d)`: folded codes and folded scales."""
    lower = jnp.where(strictly_lower(x.shape[-1]), x, 0)
    scales = tile_scales(lower, codec.block)
    codes = quantize(lower, scales, codec, dither)
    return Coded(pack(fold(codes), codec), fold(with_room(scales)))


def zero_codes(x: jax.Array, codec: Codec) -> jax.Array:
    """The packed codes of zeros of the shape of `x`."""
    return pack(jnp.full_like(x, codec.book.zero, jnp.uint8), codec)


def encode_zeros(x: jax.Array, codec: Codec) -> Coded:
    """`encode_lower` of zeros of the shape of `x (..., d, d)`, in a shorter program."""
    scales = fold(with_room(jnp.zeros_like(tile_scales(x, codec.block))))
    return Coded(zero_codes(fold(x), codec), scales)


def decode_lower(coded: Any, codec: Codec, order: int = 0) -> jax.Array:
    """The strictly lower triangle `(..., d, d)` of anything with folded codes and scales.

    Without an `order` it is that of the diagonal.
    """
    order = order or coded.diagonal.shape[-1]
    codes = unfold(unpack(coded.codes, codec, order))
    values = dequantize(codes, without_room(unfold(coded.scales)), codec)
    return jnp.where(strictly_lower(order), values, 0)
