"""NorMuon's second moment on both sides, and neurons that stay zero."""

import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.normuon import normalize_neurons

GRADIENTS = [np.random.default_rng(t).standard_normal((2, 6, 4)) for t in range(5)]
SCALED = [np.float32(g * np.array([1, 10, 0.1, 0])) for g in GRADIENTS]


@pytest.mark.parametrize(("side", "order", "axis"), [("left", 6, 1), ("right", 4, 0), (None, 4, 0)])
@pytest.mark.parametrize("b2", [0.0, 0.9])
def test_neurons_follow_the_transcription(side, order, axis, b2):
    """With matrices that keep their norm; without memory neurons get one length."""
    own = {} if side is None else {"side": side}
    found, states = run_scanned(curvax.normalize_neurons(b2, eps=0.0, **own), SCALED)
    assert states[-1].neurons.shape == (2, order)
    for i in range(2):
        v = 0.0
        for x, g in zip(found, SCALED, strict=True):
            expected, v = normalize_neurons(np.float64(g[i]), v, b2, 0.0, "norm", axis)
            assert_close(x[i], expected, 16)
