"""Dtypes: updates and states keep theirs, nothing is promoted in silence, and float16 is enough.

Optimizers of parameters in float16 compute in float32, and round their updates.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.contract import shapes_and_dtypes, small_tree
from tests.helpers import assert_close, trajectory, zeros_like
from tests.registry import REGISTRY, Row

MOMENTA = {"mu", "trace"}


@pytest.fixture
def optax_corrects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optax's bias correction promotes: it takes a float to an int32 power."""
    for module, name in (
        (optax.tree, "bias_correction"),
        (optax.tree_utils, "tree_bias_correction"),
    ):
        monkeypatch.setattr(module, name, lambda moment, decay, count: moment)


def stepped(transform: Any, params: Any, gradients: Any, updates: Any, given: Any = None) -> Any:
    """The state's types, which a step keeps, as it does those of updates: it can be a branch.

    If all dtypes are the same, nothing is promoted in it.
    """
    transform = optax.with_extra_args_support(transform)
    dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
    gradient = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, gradients), params)

    def step(apply: Any, gradient: Any, state: Any, given: Any) -> Any:
        update = lambda: transform.update(gradient, state, given, value=1.0, other="x")  # noqa: E731
        return jax.lax.cond(apply, update, lambda: (optax.tree.cast(gradient, updates), state))

    strict = jax.numpy_dtype_promotion("strict") if dtypes == {gradients} else nullcontext()
    with strict:
        state = jax.eval_shape(transform.init, params)
        found, after = jax.eval_shape(step, jnp.bool_(True), gradient, state, given)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(updates)}
    return state


@pytest.mark.usefixtures("optax_corrects_nothing")
@pytest.mark.parametrize("gradients", ["bfloat16", "float32"])
@pytest.mark.parametrize("params", ["bfloat16", "float32"])
@pytest.mark.parametrize("row", cells(REGISTRY, of=9))
def test_dtypes_are_stable(row: Row, params: str, gradients: str) -> None:
    """Updates have the wider dtype of gradients and parameters, directions that of gradients; the
    state, whose statistics are float32, keeps its own."""
    tree, matrix, optimizer = small_tree(params), np.zeros((2, 4, 6), params), row.make()
    state = stepped(optimizer, tree, gradients, jnp.promote_types(params, gradients), tree)
    entries = curvax.state_of(optimizer, tree, zeros_like(state), "dense/kernel")
    statistics = [x.dtype for place, x in entries.items() if MOMENTA.isdisjoint(place.split("/"))]
    assert jnp.dtype(jnp.bfloat16) not in statistics
    stepped(row.make_direction(), matrix, gradients, gradients, row.needed(matrix))
    if not row.reads_weights:
        stepped(optimizer, tree, gradients, gradients)


AXES: dict[str, Any] = {"weight_dimension_numbers": {"kernel": curvax.MatrixAxes(1, 2)}}
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


@pytest.mark.usefixtures("optax_corrects_nothing")
@pytest.mark.parametrize("name", cells(PARTS, of=6))
def test_parts_are_strict_too(name: str) -> None:
    for dtype in ("bfloat16", "float32"):
        params = {"kernel": np.zeros((2, 128, 128), dtype), "bias": np.zeros(128, dtype)}
        stepped(curvax.assemble(PARTS[name](), 0.1, **AXES), params, dtype, dtype, params)


# Float16.

SIZES = (0, 1e-5, 1e-3, 10)  # of which float16 holds neither the squares nor 1e-8
SMALL: dict[str, Any] = {"eps": 1e-9, "graft": "adam"}
GRAFTED = {  # before it gets its length, a direction may be longer than float16 holds
    "foam": functools.partial(curvax.scale_by_foam, **SMALL),
    "dr_shampoo": functools.partial(curvax.scale_by_dr_shampoo, **SMALL),
    "shampoo": functools.partial(curvax.scale_by_shampoo, refresh=1, statistics_every=1, **SMALL),
}
COMPOSED = {
    "a base": lambda: curvax.shampoo(0.1, base=optax.adam, refresh=1, statistics_every=1),
    "Lion for others": lambda: curvax.muon(0.1, others=optax.lion(0.1)),
    "RMSProp for others": lambda: curvax.muon(0.1, others=optax.rmsprop(0.1)),
    "only if finite": lambda: optax.apply_if_finite(curvax.muon(0.1), 2),
}
ROUNDED: dict[str, tuple[Any, float]] = {  # and how many units they may differ by
    **{row.name: (lambda row=row: row.make(**row.for_fuzzing()), 1.0) for row in REGISTRY},
    **{name: (make, 1.0) for name, make in COMPOSED.items()},
    **{f"direction of {name}": (make, 4.0) for name, make in GRAFTED.items()},
}


@pytest.mark.parametrize("name", cells(ROUNDED, of=8))
def test_updates_in_float16_are_those_of_float32_rounded(name: str) -> None:
    make, units = ROUNDED[name]
    random, shapes = np.random.default_rng(0), {"kernel": (4, 6), "bias": (6,)}
    if "direction" in name:
        del shapes["bias"]
    gradients = {
        x: np.stack([np.float16(size * random.standard_normal(shape)) for size in SIZES])
        for x, shape in shapes.items()
    }
    run, found = jax.jit(trajectory(make())), []
    for dtype in (np.float16, np.float32):
        given = {"dense": {x: dtype(g) for x, g in gradients.items()}}
        found.append(run(given, jax.tree.map(lambda g: g[0] + 1, given))[0])
    assert all(x.dtype == jnp.float16 and x[-1].any() for x in jax.tree.leaves(found[0]))
    assert_close(*found, units)
