"""Orthogonalization as a transformation: by QR first, and of matrices that have no polar factor."""

import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned


def _drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (6, 6)])
def test_orthogonalizing_by_qr_first_changes_nothing(shape):
    matrix = _drawn(*shape)
    deficient = matrix.copy()
    deficient[0] = deficient[1]
    batch = np.stack([matrix, deficient, 0 * matrix])
    methods = (curvax.orthogonalize(method) for method in ("svd", "qr_svd"))
    (by_svd,), (by_qr,) = (run_scanned(method, [batch])[0] for method in methods)
    assert_close(by_qr, by_svd, 256)


@pytest.mark.parametrize("method", ["svd", "qr_svd"])
def test_a_matrix_with_an_infinite_entry_gives_nan_and_leaves_others_alone(method):
    """Not zero: behind a damaged momentum, the guard has to see it. Not counted as a failure."""
    batch = np.stack([_drawn(5, 8)] * 2)
    batch[0, 2, 3] = np.inf
    (found,), (state,) = run_scanned(curvax.orthogonalize(method), [batch])
    assert np.isnan(found[0]).all() and found[1].any() and np.isfinite(found[1]).all()
    assert state.failures.tolist() == [0, 0]
