"""Cautious updates: whose entries count, and signs of tiny numbers."""

import jax.numpy as jnp
import numpy as np
import optax

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.cautious_updates import cautious_updates
from tests.reference.muon import momenta


def test_a_vector_is_scaled_as_a_whole() -> None:
    """Batches matrix by matrix, as in `test_transcriptions.py`."""
    draw = np.random.default_rng(0)
    gradients = [draw.standard_normal(7).astype(np.float32) for _ in range(6)]
    found, _ = run_scanned(curvax.cautious_updates(curvax.momentum(0.9)), gradients)
    given = [np.float64(g) for g in gradients]
    averages = [m for m, _ in momenta(given, 0.9, nesterov=False, bias_correction=False)]
    expected = cautious_updates(averages, given, scale="count")
    assert_close(found, [np.float32(x) for x in expected], 16)


def test_tiny_numbers_of_one_sign_agree_and_nan_shows() -> None:
    ours = curvax.cautious_updates(optax.scale(1e-20), rescale=False)
    g = jnp.array([1e-15, -1e-15, jnp.nan])
    found = ours.update(g, ours.init(g))[0]
    assert np.sign(found[:2]).tolist() == [1.0, -1.0] and np.isnan(found[2])
