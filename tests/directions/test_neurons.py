"""NorMuon's second moment: equal neurons, kept norms, both sides."""

import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.shared.transcriptions import program_of_step

GRADIENTS = [
    np.random.default_rng(t).standard_normal((2, 6, 4)).astype("float32") for t in range(5)
]
SCALED = [g * np.array([1, 10, 0.1, 0], "float32") for g in GRADIENTS]


def test_neurons_get_the_same_length_and_matrices_keep_their_norm():
    found, _ = run_scanned(curvax.normalize_neurons(b2=0.0, eps=0.0), SCALED)
    for x, g in zip(found, SCALED, strict=True):
        lengths = np.linalg.norm(x, axis=-2)
        assert not lengths[:, 3].any()
        norm = np.linalg.norm(g, axis=(-2, -1))
        assert_close(lengths[:, :3], np.repeat(norm[:, None] / 3**0.5, 3, axis=1), 16)


@pytest.mark.parametrize(("side", "order"), [("left", 6), ("right", 4), ("smaller", 4)])
def test_sides_are_transposes(side, order):
    transform = curvax.normalize_neurons(side=side)
    found, states = run_scanned(transform, GRADIENTS)
    assert states[-1].neurons.shape == (2, order)
    other = {"left": "right", "right": "left", "smaller": "smaller"}[side]
    flipped, _ = run_scanned(
        curvax.normalize_neurons(side=other), [g.swapaxes(1, 2) for g in GRADIENTS]
    )
    assert_close([x.swapaxes(1, 2) for x in flipped], found, 8)


def test_muon_with_b2_is_normuon():
    """Whose trajectory is compared with the paper's in `test_references.py`."""
    normuon = optax.chain(curvax.scale_by_muon(), curvax.normalize_neurons(0.9))
    programs = [program_of_step(x) for x in (normuon, curvax.scale_by_muon(b2=0.9))]
    assert programs[0] == programs[1] != program_of_step(curvax.scale_by_muon())
