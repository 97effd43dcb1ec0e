"""With `jax_numpy_dtype_promotion="strict"`, which refuses to add float32 and bfloat16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from tests.cells import cells
from tests.registry import REGISTRY

AXES: dict[str, Any] = {"weight_dimension_numbers": {"kernel": curvax.MatrixAxes(1, 2)}}
SHAPES = {"kernel": (2, 128, 128), "bias": (128,)}
PARTS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "quantized": lambda: curvax.scale_by_soap(storage=curvax.quantized(4)),
    "packed": lambda: curvax.scale_by_soap(storage=curvax.packed()),
    "cholesky": lambda: curvax.scale_by_shampoo(storage=curvax.cholesky()),
    "dion": lambda: curvax.scale_by_dion(4),
    "corrected means": lambda: curvax.scale_by_rows_and_columns(bias_correction=True),
    "quantized moments": lambda: curvax.quantize_state(curvax.momentum(), dither=True),
    **{
        name: lambda name=name: curvax.orthogonalize(name)
        for name in ("newton_schulz", "svd", "qr_svd", "qdwh")
    },
}
CASES: dict[str, Callable[[], optax.GradientTransformation]] = {
    **{row.name: lambda row=row: row.make(0.1, **AXES) for row in REGISTRY},
    **{
        name: lambda part=part: curvax.assemble(part(), 0.1, **AXES) for name, part in PARTS.items()
    },
}


@pytest.mark.parametrize("name", cells(CASES, of=3))
def test_nothing_is_promoted_implicitly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But by Optax's bias correction, which takes a float to an int32 power."""
    for module, theirs in (
        (optax.tree, "bias_correction"),
        (optax.tree_utils, "tree_bias_correction"),
    ):
        monkeypatch.setattr(module, theirs, lambda moment, decay, count: moment)
    optimizer = CASES[name]()

    def update(gradients: Any) -> Any:
        return optimizer.update(gradients, optimizer.init(gradients), gradients)

    for dtype in (jnp.float32, jnp.bfloat16):
        params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}
        with jax.numpy_dtype_promotion("strict"):
            updates, _ = jax.eval_shape(update, params)
        assert jax.tree.map(lambda x: x.dtype, updates) == dict.fromkeys(SHAPES, dtype)
