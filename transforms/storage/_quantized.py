r"""Storage of factors and roots as quantized squares: vanilla quantization (VQ).

Off-diagonal elements are quantized (`_codec.py`), and diagonals stay as they are:
$\bar L = (Q(L - \mathrm{diag}(L)), \mathrm{diag}(L))$ (Li et al., arXiv:2412.10663, Eqs 5 and 6). A
factor may decode to an indefinite matrix. Its root then raises negative eigenvalues to 0 before
damping, and the factor's `indefinite` counts it.

*Bytes* for order `d`, block `B`: `d ⌈d/2⌉ + 4 ⌈d/B⌉² + 4 d`, for a statistic and for a root (`d²`
instead of `d ⌈d/2⌉` in 8 bits).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._validate import OneOf, check_fields, checked
from ..linalg._platforms import diagonals, materialized, with_diagonal
from ._codec import SIGNED, Codec, Coded, decode, encode
from ._storage import Storage

MIN_ELEMENTS = 4096
"""Factors with fewer elements are not quantized (arXiv:2412.10663, C.3)."""

SINGLY_FROM = 128
"""Matrices of at least this order are decoded one at a time: this is faster than all at once and
needs the memory of one matrix (measured in November 2026)."""


class Square(NamedTuple):
    """A batch of quantized square matrices."""

    codes: jax.Array  # uint8 (..., d, ⌈d/2⌉)
    scales: jax.Array  # (..., ⌈d/B⌉, ⌈d/B⌉)
    diagonal: jax.Array | None  # (..., d), unless it is quantized too


@dataclasses.dataclass(frozen=True)
class Quantized(Storage):
    codec: Codec
    keep_diagonal: bool = True
    min_elements: int = MIN_ELEMENTS

    __post_init__ = check_fields

    def describe(self, order: int) -> str:
        if self.exact(order):
            return f"dense, as {order}² < {self.min_elements}"
        return self.codec.describe()

    def decodes_singly(self, order: int) -> bool:
        return order >= SINGLY_FROM

    def exact(self, order: int) -> bool:
        return order * order < self.min_elements

    def encode_factor(self, x: jax.Array, previous: Any = None) -> Any:
        if self.exact(x.shape[-1]):
            return x
        diagonal = diagonals(x) if self.keep_diagonal else None
        if self.keep_diagonal:
            x = jnp.where(jnp.eye(x.shape[-1], dtype=bool), 0, x)
        return Square(*encode(x, self.codec), diagonal)

    def decode_factor(self, stored: Any) -> jax.Array:
        if not isinstance(stored, Square):
            return stored
        x = decode(Coded(stored.codes, stored.scales), self.codec, stored.codes.shape[-2])
        if stored.diagonal is not None:
            x = with_diagonal(x, stored.diagonal)
        return materialized(x)

    encode_root = encode_basis = encode_factor
    decode_root = decode_basis = decode_factor


@checked
def quantized(
    bits: int = 4,
    block: int = 64,
    *,
    map: str = "linear2",
    keep_diagonal: bool = True,
    min_elements: int = MIN_ELEMENTS,
) -> Quantized:
    """Stores factors and inverse roots in `bits` bits per element (VQ).

    From order 256 on, a factor and its root in 4 bits take less than 1/7 of their float32 memory.
    It may be indefinite; `cholesky` stays positive semi-definite, in half the memory.

    Args:
      bits: 4, 6 or 8.
      block: even width of the square tiles that share a scale.
      map: "linear2" or "linear", the map from codes to values: uniform steps after a signed square
        root, or uniform steps.
      keep_diagonal: whether diagonals stay in float32.
      min_elements: matrices with fewer elements stay dense.

    Raises:
      ValueError: if an argument is not allowed; the message lists the allowed values.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"kernel": jnp.zeros((256, 512))}
      >>> def state_bytes(storage):
      ...     return curvax.state_bytes(curvax.shampoo(0.1, base=None, storage=storage), params)
      >>> state_bytes(curvax.dense()) / state_bytes(curvax.quantized()) > 7
      True

    References:
      Li et al., `Memory-Efficient 4-bit Preconditioned Stochastic Optimization
      <https://arxiv.org/abs/2412.10663>`_, section 3.2, Eqs 3 to 6.
    """
    return Quantized(codec_of_factors(bits, block, map), keep_diagonal, min_elements)


def codec_of_factors(bits: int, block: int, map: str) -> Codec:
    """The codec of factors, whose elements may be negative."""
    OneOf(SIGNED).check("map", map)
    return Codec(bits, block, map)
