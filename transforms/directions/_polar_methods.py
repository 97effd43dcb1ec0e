"""Values for `method=` of `orthogonalize`: how to compute a polar factor.

`linalg/_polar.py` has their cost and their numerics.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._validate import Value, check_choice, check_dtype, check_interval, check_positive_int
from ..linalg import _polar
from ..linalg._polar import NORMS, Coefficients, coefficient_rows
from ..linalg._split import AxisName


class PolarMethod(Value):
    """The type of `method=`."""

    can_fail: bool  # whether a finite matrix may have a factor that is not finite
    by_products = False  # whether devices can share the work on a matrix

    @abc.abstractmethod
    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Computes the polar factors of `x (..., m, n)`; devices of `axis_name` share the work."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(PolarMethod):
    """See `newton_schulz`."""

    steps: int = 5
    coefficients: Coefficients = "quintic"
    norm: str = "frobenius"
    eps: Any = 1e-8
    dtype: Any = None

    can_fail, by_products = False, True

    def __post_init__(self) -> None:
        """Checks the arguments of `newton_schulz`."""
        check_positive_int("steps", self.steps)
        check_choice("norm", self.norm, NORMS)
        check_interval("eps", self.eps, 0.0)
        if self.dtype is not None:
            check_dtype("dtype", self.dtype)
        coefficient_rows(self.coefficients, self.steps)
        several = not isinstance(self.coefficients, str) and isinstance(
            self.coefficients[0], Sequence
        )
        if several and len(self.coefficients) > self.steps:
            raise ValueError(
                f"coefficients must have at most steps={self.steps} rows, got "
                f"{self.coefficients!r}."
            )

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Iterates."""
        return _polar.newton_schulz(
            x, self.coefficients, self.steps, self.eps, self.norm, self.dtype, axis_name
        )


@dataclasses.dataclass(frozen=True)
class Svd(PolarMethod):
    """See `svd`."""

    can_fail = True

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Decomposes."""
        return _polar.polar_svd(x, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class QrSvd(PolarMethod):
    """See `qr_svd`."""

    can_fail = True

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Decomposes."""
        return _polar.polar_qr_svd(x, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class Qdwh(PolarMethod):
    """See `qdwh`."""

    can_fail, by_products = True, True

    def factor(self, x: jax.Array, axis_name: AxisName = None) -> jax.Array:
        """Decomposes."""
        return _polar.polar_qdwh(x, axis_name=axis_name)


def newton_schulz(
    steps: int = 5,
    *,
    coefficients: Coefficients = "quintic",
    norm: str = "frobenius",
    eps: jax.typing.ArrayLike = 1e-8,
    dtype: jax.typing.DTypeLike | None = None,
) -> NewtonSchulz:
    """Approximates the polar factor by Newton-Schulz iterations, with matrix products only.

    Args:
      steps: number of iterations.
      coefficients: "quintic" (Muon's), "classical", "polar_express", "turbo_muon" (for `norm="aol"`
        and 4 steps), three numbers, or a row of three per iteration (the last one repeats).
      norm: what divides the matrix: "frobenius", "gram" or "aol" (Turbo-Muon), see
        `curvax.newton_schulz`.
      eps: added to this norm.
      dtype: dtype of the iterations, such as bfloat16; `None` is that of the matrix.

    Raises:
      ValueError: if an argument is not allowed; the message names it.

    Example:
      >>> import curvax
      >>> turbo = curvax.polar.newton_schulz(4, coefficients="turbo_muon", norm="aol")
      >>> optimizer = curvax.muon(0.02, method=turbo)
    """
    return NewtonSchulz(steps, coefficients, norm, eps, dtype)


def svd() -> Svd:
    """Computes the polar factor by an SVD; zero singular values stay zero."""
    return Svd()


def qr_svd() -> QrSvd:
    """Like `svd`, after a QR decomposition down to the smaller order: for long matrices."""
    return QrSvd()


def qdwh() -> Qdwh:
    """Computes the polar factor of a matrix of full rank by QDWH iteration."""
    return Qdwh()


POLAR_METHODS = {
    "newton_schulz": NewtonSchulz(),
    "svd": Svd(),
    "qr_svd": QrSvd(),
    "qdwh": Qdwh(),
}
"""The plain methods, by name."""
