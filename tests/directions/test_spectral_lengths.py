"""Directions of a given spectral norm."""

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.muon import momenta
from tests.reference.spectral import spectral_norm, spectrally_normalized
from tests.shared.transcriptions import HARD

SPECTRAL = curvax.normalize_matrices(1.0, norm="spectral")


@pytest.mark.parametrize("name", HARD)
def test_momenta_get_the_spectral_norm_of_the_transcription(name: str) -> None:
    """Up to the distance of the Schatten norm by products, which is above: at most 0.1 %."""
    gradients = HARD[name]
    ours = optax.chain(curvax.momentum(0.9), SPECTRAL)
    with jax.enable_x64(True):
        found, _ = run_scanned(ours, list(gradients))
    for place in np.ndindex(gradients.shape[1:-2]):
        own = momenta([g[place] for g in gradients], 0.9, False, "ema", False)
        for x, (m, _) in zip(found, own, strict=True):
            assert_close(x[place], spectrally_normalized(m), 1, eps=1e-3)
            # The same direction, exactly.
            assert_close(spectrally_normalized(x[place]), spectrally_normalized(m), 64)
            assert 0.999 < spectral_norm(x[place]) < 1 + 1e-12


def test_huge_and_tiny_matrices_of_a_batch_get_it_and_zeros_stay() -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
    x *= np.array([1e-30, 1.0, 1e30, 0.0], np.float32)[:, None, None]
    three = curvax.normalize_matrices(3.0, norm="spectral")
    found = np.asarray(three.update(x, three.init(x))[0], np.float64)
    assert [spectral_norm(y) for y in found[:3]] == pytest.approx([3.0] * 3, rel=1e-3)
    assert not found[3].any()
    x[0, 0, 0] = np.nan
    assert np.isnan(three.update(x, three.init(x))[0][0]).all()
