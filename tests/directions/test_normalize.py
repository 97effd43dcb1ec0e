"""Normalization of columns."""

import numpy as np

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference import swan as swan_reference


def test_columns_are_normalized_as_in_the_transcription():
    g = np.random.default_rng(0).standard_normal((5, 8))
    g[:, 3] = 0
    (found,), _ = run_scanned(curvax.normalize_columns(), [np.float32(g)])
    assert_close(found, swan_reference.normalize_columns(g), 16)


def test_rows_are_normalized_as_columns_of_the_transpose():
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    g[1] = 0.0
    (rows,), _ = run_scanned(curvax.normalize_rows(), [g])
    (columns,), _ = run_scanned(curvax.normalize_columns(), [g.T])
    assert_close(rows, columns.T, 16)
    assert_close(np.linalg.norm(rows, axis=1), np.array([1.0, 0.0, 1.0]), 16)
