"""Normalization of columns."""

import numpy as np
from helpers import assert_close, run_scanned
from reference import swan as swan_reference

import curvax


def test_columns_are_normalized_as_in_the_transcription():
    g = np.random.default_rng(0).standard_normal((5, 8))
    g[:, 3] = 0
    (found,), _ = run_scanned(curvax.normalize_columns(), [np.float32(g)])
    assert_close(found, swan_reference.normalize_columns(g), 16)
