r"""Storage of factors as quantized Cholesky factors (CQ), optionally with error feedback (CQ+EF).

$$C = \mathrm{chol}(L + \epsilon I), \qquad \bar C = Q(C + E), \qquad
E \leftarrow \beta_e E + (1 - \beta_e)\,(C + E - D(\bar C)), \qquad L = D(\bar C)\,D(\bar C)^\top$$

$E = 0$ without error feedback (Li et al., arXiv:2412.10663, Eqs 7, 8, 10 and 11). The strictly
lower triangle of $C$ is quantized, and its diagonal stays as it is. $E$ has no diagonal and is
quantized as well, with its own scales. So every stored form decodes to a positive semi-definite
matrix. If a decomposition fails with all of the diagonals that `factored` adds, the previous stored
form stays, and `failures` counts it. Inverse roots are stored as in `_quantized.py`.

*Bytes* for order `d`, block `B`, `T = ⌈d/B⌉ + 1`, in 4 bits: the triangle alone
`⌈d/2⌉² + 4 T ⌈T/2⌉ + 4 d + 4`, with error feedback `d ⌈d/2⌉ + 4 T² + 4 d + 4`. *Cost* per
statistic: one product of triangles and one Cholesky decomposition, `4 d³ / 3` FLOPs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees import where_entries
from .._validate import checked
from ..linalg._cholesky import factored
from ..linalg._numerics import tile_scales
from ..linalg._platforms import diagonals, in_rows, with_diagonal
from ..linalg._products import square_of_lower
from . import _codec
from ._codec import Codec, Coded
from ._quantized import MIN_ELEMENTS, Quantized, codec_of_factors


class Triangle(NamedTuple):
    """A batch of quantized lower triangles C; with error feedback, each in a square with its E."""

    codes: jax.Array  # uint8, C folded: (..., ⌈d/2⌉, ⌈d/2⌉); (..., d, ⌈d/2⌉) with Eᵀ above C
    scales: jax.Array  # of the tiles of C, folded: (..., ⌈T/2⌉, T); (..., T, T) with those of E
    diagonal: jax.Array  # of C, (..., d)
    failures: jax.Array  # decompositions that failed, int32 (...)


@dataclasses.dataclass(frozen=True)
class Cholesky(Quantized):
    error_feedback: Any = None
    eps: Any = 1e-6
    damping_mode: str = "relative"

    def describe(self, order: int) -> str:
        if self.exact(order):
            return super().describe(order)
        feedback = "" if self.error_feedback is None else " and error feedback"
        return f"Cholesky factor{feedback} in {self.codec.describe()}"

    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        if self.exact(x.shape[-1]):
            return x
        alone = self.error_feedback is None
        if previous is None:  # a multiple of the identity, without error
            coded = _codec.encode_zeros(x, self.codec) if alone else self._zeros(x)
            none = jnp.zeros(x.shape[:-2], jnp.int32)
            return Triangle(*coded, jnp.sqrt(diagonals(x)), none)
        c, failed = factored(x, self.eps, self.damping_mode)
        coded = _codec.encode_lower(c, self.codec) if alone else self._with_error(c, previous)
        return with_triangle(previous, coded, diagonals(c), failed)

    def _zeros(self, x: jax.Array) -> Coded:
        codes = _codec.pack(jnp.full_like(x, self.codec.zero, jnp.uint8), self.codec)
        return Coded(codes, _codec.with_room(jnp.zeros_like(tile_scales(x, self.codec.block))))

    def _with_error(self, c: jax.Array, previous: Triangle) -> Coded:
        """The codes and scales of C and its error; C is computed transposed, beside Eᵀ."""
        lower, place = _codec.strictly_lower(c.shape[-1]), jnp.arange(c.shape[-1])
        upper = place[:, None] < place[None]
        codes = _codec.unpack(previous.codes, self.codec, c.shape[-1])
        error = _codec.dequantize(codes, previous.scales.mT[..., 1:, :-1].mT, self.codec)
        error = jnp.where(upper, error, 0)
        target = jnp.where(upper, c.mT, 0) + error
        scales = tile_scales(target, self.codec.block)
        codes = _codec.quantize(target, scales, self.codec)  # Eq. 10
        decoded = jnp.where(upper, _codec.dequantize(codes, scales, self.codec), 0)
        decay = self.error_feedback
        error = decay * error + (1 - decay) * (target - decoded)  # Eq. 11
        error_scales = tile_scales(error, self.codec.block)
        error_codes = _codec.quantize(error, error_scales, self.codec)
        codes = in_rows(codes)  # XLA for GPUs would transpose all that leads to them
        packed = _codec.pack(jnp.where(lower, codes.mT, error_codes), self.codec)
        lower = _codec.strictly_lower(scales.shape[-1] + 1)
        return Coded(
            packed,
            jnp.where(lower, _codec.with_room(scales.mT), _codec.with_room(error_scales.mT).mT),
        )

    def decode_factor(self, stored: Any) -> jax.Array:
        if not isinstance(stored, Triangle):
            return stored
        if self.error_feedback is None:
            return square_of_triangle(stored, self.codec)
        order, coded = stored.diagonal.shape[-1], Coded(stored.codes, stored.scales[..., 1:, :-1])
        lower = jnp.where(_codec.strictly_lower(order), _codec.decode(coded, self.codec, order), 0)
        return square_of_lower(with_diagonal(lower, stored.diagonal))  # Eq. 7


def with_triangle(
    previous: Any, coded: Coded, diagonal: jax.Array, failed: jax.Array, **fields: jax.Array
) -> Any:
    """A stored form with another Cholesky factor, except where the decomposition `failed (...)`."""
    new = previous._replace(**coded._asdict(), diagonal=diagonal, **fields)
    kept = where_entries(~failed, new, previous)
    return kept._replace(failures=previous.failures + failed.astype(jnp.int32))


def square_of_triangle(stored: Any, codec: Codec) -> jax.Array:
    """`C Cᵀ` for a stored form with the folded codes, the scales and the diagonal of C (Eq. 7)."""
    lower = _codec.decode_lower(stored, codec, stored.diagonal.shape[-1])
    return square_of_lower(with_diagonal(lower, stored.diagonal))


@checked
def cholesky(
    bits: int = 4,
    block: int = 64,
    *,
    error_feedback: jax.typing.ArrayLike | None = None,
    eps: jax.typing.ArrayLike = 1e-6,
    damping_mode: str = "relative",
    map: str = "linear2",
    min_elements: int = MIN_ELEMENTS,
) -> Cholesky:
    """Stores factors as Cholesky factors in `bits` bits (CQ), and inverse roots like `quantized`.

    The stored factor is always positive semi-definite, and its small eigenvalues survive better
    than with `quantized`. Factor and root take 3/4 of its memory, with error feedback as much.

    Args:
      bits, map, min_elements: see `quantized`.
      block: see `quantized`. 16 takes 3 % more bytes than 64 and halves the excess of a language
        model's loss over that with float32.
      error_feedback: βe, decay rate of the running error that is added before quantization (CQ+EF;
        0.95 in the paper); `None` turns it off. In 4 bits, 0.95 helps only for flat spectra (at
        condition numbers of 3 to 100 the error of the decoded factor is up to ten times as large as
        without feedback), and 0 at all of these condition numbers.
      eps: ε, added to the factor before each decomposition.
      damping_mode: "relative": adds eps times the factor's largest entry (zeros stay zeros);
        "absolute": adds eps itself, as published, which swamps the factors of small gradients.

    Raises:
      ValueError: if an argument is not allowed; the message lists the allowed values.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"kernel": jnp.zeros((256, 512))}
      >>> def state_bytes(storage):
      ...     return curvax.state_bytes(curvax.shampoo(0.1, base=None, storage=storage), params)
      >>> state_bytes(curvax.cholesky()) / state_bytes(curvax.quantized()) < 0.77
      True

    References:
      Li et al., `Memory-Efficient 4-bit Preconditioned Stochastic Optimization
      <https://arxiv.org/abs/2412.10663>`_, Eqs 7 to 12, Algorithm 1.
    """
    return Cholesky(
        codec_of_factors(bits, block, map), True, min_elements, error_feedback, eps, damping_mode
    )
