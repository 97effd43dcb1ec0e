"""Scales of rows and columns: the fixed point of one gradient, zeros, averages."""

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, run_scanned

_scales = jax.jit(curvax.row_column_scales, static_argnums=1)


@pytest.mark.parametrize("limit", [float("inf"), 0.5])
def test_zero_rows_and_columns_give_zero_and_change_nothing_else(limit):
    zero = np.zeros((6, 7), np.float32)
    gradients = [np.asarray(g).copy() for g in gradients_like(zero, 3)]
    for g in gradients:
        g[2], g[:, 4] = 0, 0
    transformation = curvax.scale_by_rows_and_columns(0.9, iterations=10, limit=limit)
    directions, states = run_scanned(transformation, gradients, zero)
    rows, columns = [0, 1, 3, 4, 5], [0, 1, 2, 3, 5, 6]
    for direction, state in zip(directions, states, strict=True):
        assert np.array_equal(direction[2], np.zeros(7))
        assert np.array_equal(direction[:, 4], np.zeros(6))
        assert state.rows[2] == 0 and state.columns[4] == 0
    # Without them only the start of the iteration, q = 1 of another length, differs.
    inner = [g[rows][:, columns] for g in gradients]
    left = [d[rows][:, columns] for d in directions]
    right = run_scanned(transformation, inner, inner[0])[0]
    for one, other in zip(left, right, strict=True):
        assert_close(one / np.linalg.norm(one), other / np.linalg.norm(other), 64.0)


def test_corrected_averages_of_equal_gradients_are_the_scales_of_one():
    gradient = np.asarray(gradients_like(np.zeros((4, 6), np.float32), 1)[0])
    corrected = curvax.scale_by_rows_and_columns(0.9, bias_correction=True)
    directions, states = run_scanned(corrected, [gradient] * 5, gradient)
    (alone,), _ = run_scanned(curvax.scale_by_rows_and_columns(0.0), [gradient], gradient)
    # 1 - b loses a factor 1 / (1 - b) of relative precision.
    assert_close(directions, [alone] * 5, condition=10.0)
    assert [int(state.count) for state in states] == [1, 2, 3, 4, 5]
    q, _ = _scales(gradient**2, 5)
    assert_close([s.rows for s in states], [(1 - 0.9**t) * np.asarray(q) for t in range(1, 6)])
