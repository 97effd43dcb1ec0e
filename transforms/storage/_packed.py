r"""Packed storage: `bits` per degree of freedom of factors, roots and bases.

A symmetric or orthogonal matrix of order $d$ has about $d^2/2$ degrees of freedom. Each form here
keeps one strictly lower triangle of codes (`_codec.py`) and one vector. So in 8 bits it has as many
bytes as a square of 4-bit codes:

- *factors*: the Cholesky factor $C$ of $L + \epsilon I$, with its diagonal; $L = C C^\top$ stays
  positive semi-definite, and relative errors of $C$ preserve small eigenvalues (a correlation
  matrix in 8 bits loses those that roots depend on). An update is rounded with dither, so
  increments below a gap are not lost. If a decomposition fails, the previous codes stay, and
  `failures` counts it;
- *statistics in their eigenbasis* (`_graded.py`): the triangle of the matrix itself, with dither;
- *inverse roots*: the matrix itself, mirrored on reading, with its diagonal;
- *bases*: Householder vectors (`linalg/_qr.py`). Each column is scaled so that its largest entry
  below the diagonal is 1; the vector has the matching diagonal entries, with the sign of the basis'
  column. All codes decode to a matrix that is orthogonal up to float32's rounding.

*Error* for codes with largest gap $\delta$ (0.0156 in 8 bits) and tiles with scales $s$. Roots:
$|\hat X_{ij} - X_{ij}| \le \delta s / 2$. Factors: $|\hat C_{ij} - C_{ij}| \le \delta s$ and
$\|\hat L - L\| \le 2 \|C\| \|\hat C - C\| + \|\hat C - C\|^2$. Bases: a reflector moves by at most
$2 \sqrt 2\, \|\hat v_k - v_k\| / \|v_k\|$ in the Frobenius norm, the basis by their sum.

*Bytes* for order `d`, block `B`, `T = ⌈d/B⌉ + 1`, in 8 bits: `d ⌈d/2⌉ + 4 T ⌈T/2⌉ + 4 d` for a root
or basis, and 8 more for a factor (4 for one in its eigenbasis); rows of `d` codes take `3 ⌈d/4⌉`
bytes in 6 bits, `⌈d/2⌉` in 4. *Cost*: `4 d³ / 3` FLOPs per statistic that is not in its eigenbasis;
roots are decoded element by element; bases as in `linalg/_qr.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._side import Side
from .._validate import checked
from ..linalg._cholesky import factored
from ..linalg._numerics import HIGHEST
from ..linalg._platforms import diagonals, materialized, with_diagonal
from ..linalg._qr import Reflectors, formed, panels_of, reflected, reflectors_of
from ._cholesky import square_of_triangle, with_triangle
from ._codec import Codec, decode_lower, dither_of, encode_lower, encode_zeros
from ._quantized import MIN_ELEMENTS, Quantized, codec_of_factors
from ._storage import Storage, as_storage

SHORTEST = 2.0**-20
"""Columns below the diagonal are scaled as if their largest entry were at least this."""


class PackedFactor(NamedTuple):
    """A batch of quantized Cholesky factors C."""

    codes: jax.Array  # uint8 (..., ⌈d/2⌉, d) in 8 bits
    scales: jax.Array  # of the tiles of C, folded: (..., ⌈T/2⌉, T)
    diagonal: jax.Array  # of C, (..., d)
    failures: jax.Array  # decompositions that failed, int32 (...)
    updates: jax.Array  # t of the dither, int32 (...)


class PackedTriangle(NamedTuple):
    """A batch of quantized symmetric matrices X, or of Householder vectors V."""

    codes: jax.Array  # uint8 (..., ⌈d/2⌉, d) in 8 bits
    scales: jax.Array  # of the tiles of X or V, folded: (..., ⌈T/2⌉, T)
    diagonal: jax.Array  # of X, or of V times the signs S, (..., d)


class PackedCorrelation(NamedTuple):
    """A batch of quantized symmetric matrices with a unit diagonal."""

    codes: jax.Array  # uint8 (..., ⌈d/2⌉, d) in 8 bits
    scales: jax.Array  # of its tiles, folded: (..., ⌈T/2⌉, T)
    updates: jax.Array  # t of the dither, int32 (...)


@dataclasses.dataclass(frozen=True)
class Packed(Quantized):
    eps: Any = 1e-6
    bases: Storage | None = None

    def describe(self, order: int) -> str:
        if self.exact(order):
            return super().describe(order)
        triangles = f"packed triangles in {self.codec.describe()}"
        return triangles + (f"; bases: {self.bases.describe(order)}" if self.bases else "")

    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        order = x.shape[-1]
        if self.exact(order):
            return x
        if previous is None:  # a multiple of the identity
            diagonal = jnp.sqrt(diagonals(x))
            none = jnp.zeros(x.shape[:-2], jnp.int32)
            return PackedFactor(*encode_zeros(x, self.codec), diagonal, none, jnp.copy(none))
        c, failed = factored(x, self.eps, "relative")
        updates = previous.updates + 1
        coded = encode_lower(c, self.codec, dither_of(updates, order, order))
        return with_triangle(previous, coded, diagonals(c), failed, updates=updates)

    def decode_factor(self, stored: Any) -> jax.Array:
        if not isinstance(stored, PackedFactor):
            return stored
        return square_of_triangle(stored, self.codec)

    def encode_correlation(self, x: jax.Array, previous: Any) -> Any:
        order = x.shape[-1]
        if self.exact(order):
            return x
        if previous is None:  # the identity
            none = jnp.zeros(x.shape[:-2], jnp.int32)
            return PackedCorrelation(*encode_zeros(x, self.codec), none)
        updates = previous.updates + 1
        dither = dither_of(updates, order, order)
        return PackedCorrelation(*encode_lower(x, self.codec, dither), updates)

    def decode_correlation(self, stored: Any, order: int) -> jax.Array:
        if not isinstance(stored, PackedCorrelation):
            return stored
        return mirrored(stored, self.codec, jnp.ones(order, stored.scales.dtype))

    def encode_root(self, x: jax.Array) -> Any:
        if self.exact(x.shape[-1]):
            return x
        return PackedTriangle(*encode_lower(x, self.codec), diagonals(x))

    def decode_root(self, stored: Any) -> jax.Array:
        if not isinstance(stored, PackedTriangle):
            return stored
        return mirrored(stored, self.codec, stored.diagonal)

    def encode_basis(self, x: jax.Array, previous: Any) -> Any:
        if self.exact(x.shape[-1]):
            return x
        if self.bases is not None:
            return self.bases.encode_basis(x, previous)
        if previous is None:  # the identity: every reflector changes one sign
            return PackedTriangle(*encode_zeros(x, self.codec), -jnp.ones_like(x[..., 0]))
        v, signs = reflectors_of(x)
        lower = jnp.tril(v, -1)
        length = jnp.maximum(jnp.max(jnp.abs(lower), axis=-2), SHORTEST)
        coded = encode_lower(lower / length[..., None, :], self.codec)
        return PackedTriangle(*coded, signs / length)

    def decode_basis(self, stored: Any) -> jax.Array:
        if self.bases is not None:
            return self.bases.decode_basis(stored)
        if not isinstance(stored, PackedTriangle):
            return stored
        return formed(self._read(stored), precision=HIGHEST)

    def open_basis(self, stored: Any, columns: int) -> Any:
        """The basis itself, or its reflectors if it has too few columns to be worth forming."""
        if self.bases is not None:
            return self.bases.open_basis(stored, columns)
        if not isinstance(stored, PackedTriangle):
            return stored
        opened = self._read(stored)
        return opened if columns < stored.diagonal.shape[-1] else formed(opened)

    def rotate(self, opened: Any, x: jax.Array, side: Side, back: bool) -> jax.Array:
        if self.bases is not None:
            return self.bases.rotate(opened, x, side, back)
        if not isinstance(opened, Reflectors):
            return super().rotate(opened, x, side, back)
        rows = side.as_rows(x.astype(opened.signs.dtype))
        return side.as_rows(reflected(opened, rows, inverse=not back))

    def _read(self, stored: PackedTriangle) -> Reflectors:
        v = decode_lower(stored, self.codec, stored.diagonal.shape[-1])
        v = materialized(with_diagonal(v, jnp.abs(stored.diagonal)))
        return panels_of(v, jnp.sign(stored.diagonal))


def mirrored(stored: Any, codec: Codec, diagonal: jax.Array) -> jax.Array:
    """The symmetric matrices with this strictly lower triangle and diagonal."""
    lower = decode_lower(stored, codec, diagonal.shape[-1])
    return materialized(with_diagonal(lower + lower.mT, diagonal))


@checked
def packed(
    bits: int = 8,
    block: int = 64,
    *,
    eps: jax.typing.ArrayLike = 1e-6,
    map: str = "linear2",
    min_elements: int = MIN_ELEMENTS,
    bases: Storage | None = None,
) -> Packed:
    """Stores `bits` bits per degree of freedom of factors, inverse roots and bases.

    In 8 bits it takes as many bytes as `quantized` and `cholesky(error_feedback=...)` in 4 bits,
    because it stores triangles in place of squares, and gaps between codes are 16 times smaller.
    Factors stay positive semi-definite, but for those in bases, and bases stay orthogonal
    up to float32's rounding. A statistic costs half a product and a Cholesky decomposition more,
    but not with bases. SOAP's products with bases take 2 to 2.5 times as long as plain ones;
    with `bases=quantized(8)` or `bases=dense()` as long.

    Args:
      bits, block, map, min_elements: see `quantized`.
      eps: ε: this multiple of a factor's largest entry is added to its diagonal.
      bases: another storage, for bases: `dense()` keeps them decoded between refreshes and takes
        eight times the bytes, `dense(jnp.bfloat16)` four times, `quantized(8)` twice; all are read
        like plain matrices. The last two are orthogonal up to their rounding.

    Raises:
      ValueError: if an argument is not allowed; the message lists the allowed values.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"kernel": jnp.zeros((256, 512))}
      >>> def state_bytes(storage):
      ...     return curvax.state_bytes(curvax.shampoo(0.1, base=None, storage=storage), params)
      >>> 0.99 < state_bytes(curvax.packed()) / state_bytes(curvax.quantized()) < 1.01
      True
    """
    if bases is not None:
        as_storage(bases, "bases")
    codec = codec_of_factors(bits, block, map)
    return Packed(codec, min_elements=min_elements, eps=eps, bases=bases)
