r"""Code books: the values of the codes of `_codec.py`.

With $b$ bits a code $j \in \{0 \dots 2^b - 1\}$ stands for $v_j = n_j / T$ times the scale of its
tile, with integers $n_j$ that grow with $j$:

| map | $v_j$ with $k = 2j - (2^b - 1)$ |
|---|---|
| "linear2" | $k\,|k| / (2^b - 1)^2$, and 0 for $j = 2^{b-1} - 1$ |
| "linear" | $k / (2^b - 1)$ |
| "unsigned" | $((j + 1) / 2^b)^2$, for non-negative values: no code stands for 0 |

(Li et al., arXiv:2412.10663, Eqs 3 and 4.) A new one is a class and a row of `CODE_BOOKS`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class CodeBook(abc.ABC):
    """The values of codes of so many bits.

    The integers of the first and the last code are -T and T, or 1 and T where all are positive. T
    is at most 2²³, so that float32 holds the sum of two neighbors. `integers` is also defined for
    the codes -1 and 2^b, as any numbers beyond those of the ends.
    """

    bits: int

    widths: ClassVar[tuple[int, ...]] = (4, 6, 8)  # the numbers of bits that it allows
    signed: ClassVar[bool] = True  # whether it has negative values, which factors need

    @functools.cached_property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @functools.cached_property
    def zero(self) -> int:
        """The code for 0, or that of the smallest value."""
        return self.top // 2 if self.signed else 0

    @property
    @abc.abstractmethod
    def unit(self) -> int:
        """T, the common denominator of the values."""

    @abc.abstractmethod
    def integers(self, codes: Any) -> Any:
        """The integers n_j of codes, which are floats of NumPy or JAX, in the same dtype."""

    @abc.abstractmethod
    def nearby(self, integers: jax.Array) -> jax.Array:
        """Real numbers that round to within one of the nearest codes of numbers in units of 1/T."""

    def values(self) -> np.ndarray:
        """The values v_j of all codes, ascending, in float64."""
        return np.asarray(self.integers(np.arange(2.0**self.bits))) / self.unit


class Linear(CodeBook):
    """Uniform steps."""

    @functools.cached_property
    def unit(self) -> int:
        """`2^b - 1`."""
        return self.top

    def integers(self, codes: Any) -> Any:
        """The odd numbers k."""
        return 2 * codes - self.top

    def nearby(self, integers: jax.Array) -> jax.Array:
        """The inverse."""
        return (integers + self.top) / 2


class Linear2(CodeBook):
    """Uniform steps after a signed square root."""

    @functools.cached_property
    def unit(self) -> int:
        """`(2^b - 1)²`."""
        return self.top**2

    def integers(self, codes: Any) -> Any:
        """`k |k|`, and 0."""
        k = 2 * codes - self.top
        return abs(k) * k * (codes != self.zero).astype(k.dtype)

    def nearby(self, integers: jax.Array) -> jax.Array:
        """The inverse, but for the code of 0."""
        return (jnp.sign(integers) * jnp.sqrt(jnp.abs(integers)) + self.top) / 2


class Unsigned(CodeBook):
    """Uniform steps of the root, without 0."""

    signed = False

    @functools.cached_property
    def unit(self) -> int:
        """`4^b`."""
        return (self.top + 1) ** 2

    def integers(self, codes: Any) -> Any:
        """`(j + 1)²`."""
        return (codes + 1) ** 2

    def nearby(self, integers: jax.Array) -> jax.Array:
        """The inverse."""
        return jnp.sqrt(jnp.maximum(integers, 0)) - 1


CODE_BOOKS: dict[str, type[CodeBook]] = {
    "linear2": Linear2,
    "linear": Linear,
    "unsigned": Unsigned,
}
"""By the names that `map=` takes."""

SIGNED = tuple(name for name, book in CODE_BOOKS.items() if book.signed)
"""The maps for factors."""
