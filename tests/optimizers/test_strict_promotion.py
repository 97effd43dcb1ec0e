"""With `jax_numpy_dtype_promotion="strict"`, float32 matrices need no promotion of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from tests.helpers import share
from tests.registry import REGISTRY

PARAMS = {"kernel": jax.ShapeDtypeStruct((2, 128, 128), jnp.float32)}
CASES: dict[str, Callable[[], optax.GradientTransformation]] = {
    **{row.name: row.direction for row in REGISTRY},
    "quantized": lambda: curvax.scale_by_soap(storage=curvax.quantized(4)),
    "packed": lambda: curvax.scale_by_soap(storage=curvax.packed()),
    "cholesky": lambda: curvax.scale_by_shampoo(storage=curvax.cholesky()),
    "dion": lambda: curvax.scale_by_dion(4),
    "quantized moments": lambda: curvax.quantize_state(curvax.momentum(), dither=True),
    **{
        name: lambda name=name: curvax.orthogonalize(name)
        for name in ("newton_schulz", "svd", "qr_svd", "qdwh")
    },
}


@pytest.mark.parametrize("name", share(CASES, of=2))
def test_no_promotion_is_ours(name: str) -> None:
    """Optax's bias correction takes a float to an int32 power, which "strict" refuses."""
    transformation = curvax.on_matrices(
        CASES[name](), weight_dimension_numbers={"*": curvax.MatrixAxes(1, 2)}
    )

    def update(gradients: Any) -> Any:
        return transformation.update(gradients, transformation.init(gradients), gradients)

    try:
        with jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(update, PARAMS)
    except ValueError as error:
        assert "dtype promotion" in str(error)
        frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
        packages = [x for x in frames if "/optax/" in x or "/transforms/" in x]
        assert "/optax/" in packages[-1], packages[-1]
