"""RACS: its fixed point is a leading singular pair; what it does not depend on."""

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, scanned, stacked
from tests.shared.identities import STEPS, gradients_of

EPS = float(np.finfo(np.float32).eps)


@functools.cache
def _compiled(iterations: int) -> Any:
    static = {"iterations": iterations, "limit": np.inf}
    return scanned(lambda numbers: curvax.scale_by_racs(**static, **numbers))


def run_racs(gradients: Any, iterations: int = 5, **data: Any) -> Any:
    """Directions and states."""
    return _compiled(iterations)(gradients, {"b2": 0.9, "gamma": 1.01, "scale": 0.05, **data})


def _leading_pair(squares: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The unit vectors `q` and `s` of the leading singular pair, and the singular value."""
    u, values, vt = np.linalg.svd(squares, full_matrices=False)
    return np.abs(u[:, 0]), np.abs(vt[0]), float(values[0])


IN_MANY_ROUNDS = {
    str(shape): stacked(gradients_like(np.zeros(shape), STEPS, dtype="float32"))
    for shape in ((6, 10), (10, 6), (1, 5))
}


def test_without_averaging_and_with_many_iterations_the_scales_are_the_leading_singular_pair():
    _, states = run_racs(IN_MANY_ROUNDS, 12, b2=0.0)
    for name, gradients in IN_MANY_ROUNDS.items():
        q, s = states[0][name].rows[0], states[0][name].columns[0]
        expected_q, expected_s, value = _leading_pair(gradients[0].astype(np.float64) ** 2)
        assert_close(np.outer(q, s), value * np.outer(expected_q, expected_s), eps=EPS)
        assert_close(q / np.linalg.norm(q), expected_q, eps=EPS)
        assert_close(s / np.linalg.norm(s), expected_s, eps=EPS)


def test_five_rounds_reach_the_leading_singular_pair_and_one_round_does_not():
    # Proposition 3: each round multiplies the error by the squared ratio of the singular values.
    squares = np.random.default_rng(0).standard_normal((128, 256)) ** 2
    q, s, value = _leading_pair(squares)
    best = value * np.outer(q, s)
    second = np.linalg.norm(squares - best, 2)
    errors = []
    with jax.enable_x64(True):
        scales = jax.jit(lambda x: [curvax.row_column_scales(x, rounds) for rounds in (1, 2, 5)])
        for q, s in jax.tree.map(np.asarray, scales(squares)):
            errors.append(np.linalg.norm(np.outer(q, s) - best) / value)
    assert 1e-3 < errors[0] < 5e-2 and errors[2] < 1e-6
    assert errors[1] <= errors[0] * (second / value) ** 2
    assert errors[2] <= errors[1] * (second / value) ** 6


GRADIENTS = gradients_of(5, 8)
JUMPING = np.float32(3.7 ** (np.arange(STEPS) % 3))[:, None, None] * GRADIENTS


@pytest.mark.parametrize(
    ("numbers", "same"), [({"b2": 0.0}, True), ({"b2": 0.9, "gamma": 1e6}, False)], ids=str
)
def test_directions_of_racs_do_not_depend_on_the_scales_of_single_gradients_when_b2_is_0(
    numbers: dict[str, float], same: bool
) -> None:
    """The negative control has averages."""
    (scaled, _), (plain, _) = (run_racs(g, **numbers) for g in (JUMPING, GRADIENTS))
    with contextlib.nullcontext() if same else pytest.raises(AssertionError, match="exceeds"):
        assert_close(list(scaled), list(plain), 32.0)
