"""The direction of `muon`: the chain of parts that it is."""

from __future__ import annotations

import jax
import optax

from ..transforms.directions._momentum import momentum
from ..transforms.directions._orthogonalize import orthogonalize
from ..transforms.linalg._polar import Coefficients


def scale_by_muon(
    *,
    b1: jax.typing.ArrayLike = 0.95,
    nesterov: bool = True,
    accumulate: str = "ema",
    method: str = "newton_schulz",
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    eps: jax.typing.ArrayLike = 1e-8,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `muon` on batches of matrices `(..., m, n)`, without its scale by shape."""
    return optax.chain(
        momentum(
            b1,
            accumulate=accumulate,
            nesterov=nesterov,
            bias_correction=accumulate == "ema",
            dtype=dtype,
        ),
        orthogonalize(method, coefficients=coefficients, steps=steps, eps=eps),
    )
