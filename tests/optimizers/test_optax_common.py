"""Optax's own suite for contributed optimizers, `optax/contrib/_common_test.py`, on every method.

Its tests look a factory up by name and call it with settings; here they find this library's, and
its `inject_hyperparams`, which keeps integers static. Vectors are matrices of one row, so that they
reach the method too, and the leaf with three axes gets its axes. Each test runs on one
method, another one for each; with CURVAX_ALL_CELLS on all.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import pytest
from optax.contrib import _common_test as common

import curvax
from curvax.transforms.subspace import _bases
from tests.cases import ROWS, in_turns
from tests.contract import MINIMA_RATES
from tests.helpers import share
from tests.registry import NAMED, Row

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
TARGETS = (
    common._setup_parabola,
    common._setup_rosenbrock,
    common._setup_matrix_parabola,
    common._setup_mixed_tensor_target,
)


def factory(name: str) -> Any:
    """A method whose annotations are types, not strings, as the test of schedules expects."""
    optimizer = functools.partial(NAMED[name].optimizer)
    optimizer.__signature__ = inspect.signature(NAMED[name].optimizer, eval_str=True)  # pyright: ignore
    return optimizer


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_get_opt_factory", factory)
    monkeypatch.setattr(common._inject, "inject_hyperparams", curvax.inject_hyperparams)
    monkeypatch.setattr(_bases, "DRAWN", 64)  # the same numbers, and none that are thrown away


def run_theirs(test: str, row: Row, settings: Any = None, **arguments: Any) -> None:
    """Runs one test of Optax's suite on a method; the tests that Optax generates wrap it."""
    suite = common.ContribTest(f"{test}0")
    theirs = getattr(common.ContribTest, f"{test}0").__wrapped__
    rate = max(MINIMA_RATES.get(row.name, 0.1) / 10, 1e-3)
    given = {"learning_rate": rate, "matrices": "all", **row.for_contract()}
    settings = {**given, **(settings or {})}
    names = {"opt_name": row.name, "opt_kwargs": settings}
    theirs(suite, **names, wrapper_name=None, wrapper_kwargs=None, **arguments)


@in_turns(0, of=17)
def test_optimizers_accept_extra_args(row: Row) -> None:
    run_theirs("test_optimizers_accept_extra_args", row, wrap=False)


@pytest.mark.parametrize(
    ("row", "target"),
    share(
        (
            pytest.param(*row.values, target, marks=row.marks, id=f"{row.id}-{target.__name__[7:]}")
            for row in ROWS
            for target in TARGETS
        ),
        of=17,
    ),
)
def test_optimizers(row: Row, target: Any) -> None:
    """Minima are found at a constant rate, except by a method that leaves means or norms."""
    if row.blind_to:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            run_theirs("test_optimizers", row, target=target, dtype="float32")
    else:
        run_theirs("test_optimizers", row, target=target, dtype="float32")


@in_turns(3, of=17)
def test_optimizers_can_be_wrapped_in_inject_hyperparams(row: Row) -> None:
    """With numbers of few bits, which injection into float32 does not round.

    Otherwise the eigenvectors of a null space, kept in the state, differ.
    """
    settings = {**row.defaults, **row.for_contract()}
    short = {k: float(jnp.bfloat16(x)) for k, x in settings.items() if isinstance(x, float)}
    axes = {"1": curvax.MatrixAxes(rows=1, columns=2)}
    test = "test_optimizers_can_be_wrapped_in_inject_hyperparams"
    run_theirs(test, row, {**short, "weight_dimension_numbers": axes})


@pytest.mark.weekly
@pytest.mark.parametrize("dtype", share(["bfloat16", "float32"], of=2))
@in_turns(6, of=17)
def test_preserve_dtype(row: Row, dtype: str) -> None:
    run_theirs("test_preserve_dtype", row, dtype=dtype)


@pytest.mark.weekly
@pytest.mark.parametrize("dtype", share(["bfloat16", "float32"], of=2))
@in_turns(9, of=17)
def test_gradient_accumulation(row: Row, dtype: str) -> None:
    run_theirs("test_gradient_accumulation", row, dtype=dtype)


@pytest.mark.weekly
@pytest.mark.parametrize("dtype", share(DTYPES, of=3))
@in_turns(12, of=17)
def test_state_shape_dtype_shard_stability(row: Row, dtype: Any) -> None:
    run_theirs("test_state_shape_dtype_shard_stability", row, dtype=dtype)


@in_turns(15, of=17)
def test_optimizers_accept_learning_rate_schedule(row: Row) -> None:
    test = "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such"
    run_theirs(test, row)
