"""NorMuon's second moment on both sides, and neurons that stay zero."""

import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.normuon import normalize_neurons
from tests.shared.transcriptions import program_of_step

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


def test_muon_with_b2_is_normuon():
    """Whose trajectory is compared with the paper's in `test_references.py`."""
    normuon = optax.chain(curvax.scale_by_muon(), curvax.normalize_neurons(0.9))
    programs = [program_of_step(x) for x in (normuon, curvax.scale_by_muon(b2=0.9))]
    assert programs[0] == programs[1] != program_of_step(curvax.scale_by_muon())
