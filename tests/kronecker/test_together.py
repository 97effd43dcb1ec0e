"""Matrices in few bits that a GPU decodes several at a time."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.linalg import _loops
from curvax.transforms.storage import _quantized
from tests.helpers import assert_close, share
from tests.tpu_forms import loops_of

NUMBER, SHAPE = 6, (8, 12)
FORMS = {"block": 4, "min_elements": 1}
STORAGES = {
    "VQ": curvax.quantized(**FORMS),
    "CQ+EF": curvax.cholesky(error_feedback=0.95, **FORMS),
    "packed": curvax.packed(**FORMS),
}
TRANSFORMATIONS = {
    "precondition": lambda storage: curvax.precondition(
        refresh=curvax.every(2), statistics_every=1, storage=storage
    ),
    "in_eigenbasis": lambda storage: curvax.in_eigenbasis(
        optax.scale_by_adam(), refresh=curvax.every(2), storage=storage
    ),
}
ALL = [
    (make, storage)
    for make in TRANSFORMATIONS
    for storage in STORAGES
    if (make, storage) != ("precondition", "packed")
]
CELLS = share(ALL, of=len(ALL))


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quantized, "SINGLY_FROM", 1)


def gradients(steps: int) -> list[dict[str, jax.Array]]:
    """One matrix is not finite at the last step but one: it alone keeps its state."""
    draw = np.random.default_rng(0)
    drawn = draw.standard_normal((steps, NUMBER, *SHAPE)).astype(np.float32)
    drawn[-2, 2, 0, 0] = np.nan
    return [{"kernel": jnp.asarray(g)} for g in drawn]


@pytest.mark.parametrize(("make", "storage"), CELLS)
def test_matrices_of_one_round_do_not_influence_each_other(
    make: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformation = TRANSFORMATIONS[make](STORAGES[storage])
    sound = np.delete(np.arange(NUMBER), 2)

    def run() -> tuple[list[jax.Array], object]:
        update = jax.jit(lambda g, s: transformation.update(g, s))
        steps = gradients(4)
        state, found = jax.jit(transformation.init)(steps[0]), []
        for g in steps:
            directions, state = update(g, state)
            found.append(directions["kernel"][sound])
        return found, state

    alone, states_alone = run()
    monkeypatch.setattr(_loops, "VISITED", _loops.Groups(3 * max(SHAPE) ** 2))
    loops_of("gpu", monkeypatch)
    together, states_together = run()
    assert_close(together, alone, 256)
    shapes = [jax.tree.map(jnp.shape, states) for states in (states_alone, states_together)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("platform", "rounds"), [("cpu", 6), ("tpu", 6), ("cuda", 2), ("rocm", 2)])
def test_gpus_alone_take_several(
    platform: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loops, "VISITED", _loops.Groups(4 * math.prod(SHAPE)))
    stack = jax.ShapeDtypeStruct((NUMBER, *SHAPE), jnp.float32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(
        lambda x, count: _loops.visit_all(
            lambda x, _: jnp.sin(x), x, (NUMBER,), count, numbers=math.prod(SHAPE)
        )
    )
    text = step.trace(stack, count).lower(lowering_platforms=(platform,)).as_text()
    entry = "8x12" if rounds == NUMBER else f"{NUMBER // rounds}x8x12"
    assert re.findall(r"stablehlo.sine .* : tensor<([\dx]+)xf32>", text) == [entry]


@pytest.mark.parametrize(
    ("size", "most", "found"), [(48, 56, 48), (48, 14, 12), (12, 3, 3), (13, 6, 1), (5, 0, 1)]
)
def test_rounds_are_even(size: int, most: int, found: int) -> None:
    assert _loops.largest_divisor(size, most) == found
