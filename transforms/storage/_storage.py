"""Storages: how a preconditioner stores its factors, roots and bases between steps."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from .._side import LEFT, Side
from .._validate import Value, check_value, checked
from ..linalg._products import multiplied


class Storage(Value):
    """The type of `storage=`.

    Matrices are `(..., d, d)`; a stored form is a pytree of arrays with the same leading axes.
    """

    def decodes_singly(self, order: int) -> bool:
        """Whether to decode one matrix of a batch at a time (on a GPU, a few), to save memory."""
        return False

    def exact(self, order: int) -> bool:
        """Whether bases and statistics of this order come back as they were."""
        return False

    @abc.abstractmethod
    def describe(self, order: int) -> str:
        """A few words for `summarize` about the form of matrices of this order."""

    @abc.abstractmethod
    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of a statistic.

        `previous` is that before this update, for error feedback and for failed encodings; at first
        it is None, and `x` a multiple of the identity.
        """

    @abc.abstractmethod
    def decode_factor(self, stored: Any) -> jax.Array:
        """The statistic, in float32 at least."""

    def encode_correlation(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of a statistic with a unit diagonal, near the identity."""
        return self.encode_factor(x, previous)

    def decode_correlation(self, stored: Any, order: int) -> jax.Array:
        """This statistic `(..., order, order)`, in float32 at least."""
        return self.decode_factor(stored)

    @abc.abstractmethod
    def encode_root(self, x: jax.Array) -> Any:
        """The stored form of an inverse root, which is symmetric."""

    @abc.abstractmethod
    def decode_root(self, stored: Any) -> jax.Array:
        """The inverse root, in float32 at least."""

    @abc.abstractmethod
    def encode_basis(self, x: jax.Array, previous: Any) -> Any:
        """The stored form of an orthogonal basis; at first `x` is the identity."""

    @abc.abstractmethod
    def decode_basis(self, stored: Any) -> jax.Array:
        """The basis, in float32 at least."""

    def open_basis(self, stored: Any, columns: int) -> Any:
        """The basis as `rotate` takes it, perhaps undecoded, for `columns` (right: rows) of `x`."""
        return self.decode_basis(stored)

    def rotate(self, opened: Any, x: jax.Array, side: Side, back: bool) -> jax.Array:
        """`Uᵀ x` for an opened basis `U` and `x (..., m, n)`, or `x U` on the right side.

        With `back` the inverse: `U x` or `x Uᵀ`. In the dtype of the basis.
        """
        x = x.astype(opened.dtype)
        if side is LEFT:
            return multiplied(opened, x, sums=(-1 if back else -2, -2))
        return multiplied(x, opened, sums=(-1, -1 if back else -2))


class StorageRecord(NamedTuple):
    """A factor's record of the form in which matrices of its order are stored."""

    order: int
    form: str


@dataclasses.dataclass(frozen=True)
class Dense(Storage):
    dtype: Any = None

    def exact(self, order: int) -> bool:
        return self.dtype is None

    def describe(self, order: int) -> str:
        return "dense" if self.dtype is None else str(self.dtype)

    def encode_factor(self, x: jax.Array, previous: Any = None) -> jax.Array:
        return x if self.dtype is None else x.astype(self.dtype)

    def decode_factor(self, stored: jax.Array) -> jax.Array:
        return stored.astype(np.promote_types(stored.dtype, np.float32))

    encode_root = encode_basis = encode_factor
    decode_root = decode_basis = decode_factor


@checked
def dense(dtype: jax.typing.DTypeLike | None = None) -> Dense:
    """Stores factors and roots as plain arrays.

    Args:
      dtype: their floating dtype; `None` is float32, or float64 for float64 parameters. bfloat16 is
        meant for roots: a running average in bfloat16 with `b2` above 0.99 stops changing.

    Raises:
      ValueError: if `dtype` is not a real floating dtype.
    """
    return Dense(None if dtype is None else jax.numpy.dtype(dtype))


def as_storage(storage: Any, name: str = "storage") -> Storage:
    """`storage`, or `dense()` for None."""
    storage = dense() if storage is None else storage
    examples = "curvax.quantized(), curvax.cholesky(), curvax.packed() or curvax.dense(), or None"
    check_value(name, storage, Storage, examples)
    return storage
