r"""Storage of factors and roots as squares of few-bit codes: vanilla quantization (VQ).

Off-diagonal elements are coded (`_codec.py`), diagonals kept: $\bar L = (Q(L - \mathrm{diag}(L)),
\mathrm{diag}(L))$ (Li et al., arXiv:2412.10663, Eqs 5 and 6). A factor that decodes indefinite has
its eigenvalues raised to 0 for its root, before damping; the factor's `indefinite` counts that.

*Bytes* of an order `d`, block `B`: `d ⌈d/2⌉ + 4 ⌈d/B⌉² + 4 d`, for a statistic and for a root (`d²`
instead of `d ⌈d/2⌉` in 8 bits). Orders with fewer than `min_elements` elements stay as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._validate import check_bool, check_positive_int
from ._codec import Codec, Coded, decode, encode

MIN_ELEMENTS = 4096
"""Factors of fewer elements are not quantized (arXiv:2412.10663, C.3)."""

ONE_BY_ONE_FROM = 128
"""From this order on, matrices are decoded one at a time: faster than all at once, and in one
matrix's memory (`python -m benchmarks storage --only decoding`)."""


class Square(NamedTuple):
    """A batch of square matrices in codes."""

    codes: jax.Array  # uint8 (..., d, ⌈d/2⌉)
    scales: jax.Array  # (..., ⌈d/B⌉, ⌈d/B⌉)
    diagonal: jax.Array | None  # (..., d), if it is kept


def encode_square(x: jax.Array, codec: Codec, keep_diagonal: bool = True) -> Square:
    """The codes of `x (..., d, d)`, with its diagonal apart or coded as well."""
    diagonal = jnp.diagonal(x, axis1=-2, axis2=-1) if keep_diagonal else None
    if keep_diagonal:
        x = jnp.where(jnp.eye(x.shape[-1], dtype=bool), 0, x)
    return Square(*encode(x, codec), diagonal)


def decode_square(stored: Square, codec: Codec) -> jax.Array:
    """The matrices `(..., d, d)` that the codes stand for."""
    order = stored.codes.shape[-2]
    x = decode(Coded(stored.codes, stored.scales), codec, order)
    if stored.diagonal is None:
        return x
    return jnp.where(jnp.eye(order, dtype=bool), stored.diagonal[..., None], x)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """See `quantized`."""

    codec: Codec
    keep_diagonal: bool = True
    min_elements: int = MIN_ELEMENTS

    def is_dense(self, order: int) -> bool:
        """Whether matrices of this order are too small for codes."""
        return order * order < self.min_elements

    def describe(self, order: int) -> str:
        """How factors of this order are kept."""
        if self.is_dense(order):
            return f"dense, as {order}² < {self.min_elements}"
        return f"{self.codec.bits} bits"

    def one_by_one(self, order: int) -> bool:
        """Large ones are decoded one at a time."""
        return order >= ONE_BY_ONE_FROM

    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        """The codes of a statistic."""
        del previous
        return self.encode_root(x)

    def decode_factor(self, stored: Any) -> jax.Array:
        """The statistic; it may be indefinite."""
        return self.decode_root(stored)

    def encode_root(self, x: jax.Array) -> Any:
        """The codes of an inverse root."""
        if self.is_dense(x.shape[-1]):
            return x
        return encode_square(x, self.codec, self.keep_diagonal)

    def decode_root(self, stored: Any) -> jax.Array:
        """The inverse root."""
        return decode_square(stored, self.codec) if isinstance(stored, Square) else stored


def quantized(
    bits: int = 4,
    block: int = 64,
    *,
    map: str = "linear2",
    keep_diagonal: bool = True,
    min_elements: int = MIN_ELEMENTS,
) -> Quantized:
    """Keeps factors and inverse roots in `bits` bits an element (VQ).

    In 4 bits a float32 factor and its root take less than 1/7 of their memory from order 256 on. A
    coded statistic need not be positive semi-definite any more: `cholesky` keeps it so, in half the
    memory for statistics.

    Args:
      bits: 4 or 8.
      block: width of the square tiles that share a scale; even.
      map: "linear2" or "linear", see `encode`.
      keep_diagonal: keep diagonals as they are, in float32.
      min_elements: smaller matrices stay dense.

    Raises:
      ValueError: naming the argument, its value and what is allowed.

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
    check_positive_int("min_elements", min_elements)
    check_bool("keep_diagonal", keep_diagonal)
    if map == "unsigned":
        raise ValueError("map must be 'linear2' or 'linear' for factors, got 'unsigned'.")
    return Quantized(Codec(bits, block, map), keep_diagonal, min_elements)
