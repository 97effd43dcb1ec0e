"""OSGDM against its transcription, and as Muon without momentum."""

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close
from tests.reference.osgdm import osgdm as osgdm_reference

STEPS = 12


def _gradients(*shape):
    return np.random.default_rng(shape).standard_normal((STEPS, *shape))


def test_osgdm_without_momentum_is_exact_muon_without_momentum():
    params = {"dense": {"kernel": np.zeros((6, 9), np.float32)}}
    gradient = {"dense": {"kernel": np.float32(_gradients(6, 9)[0])}}
    osgdm = curvax.osgdm(0.1, b1=0.0)
    muon = curvax.muon(0.1, b1=0.0, nesterov=False, method="svd", consistent_rms=1 / 3)
    updates = [
        jax.jit(o.update)(gradient, jax.jit(o.init)(params), params)[0] for o in (osgdm, muon)
    ]
    assert_close(updates[0], updates[1], 64)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_osgdm_follows_the_transcription_under_a_schedule(decay):
    """Every direction keeps its own learning rate; weight decay stays out of the momentum."""
    rates = [0.1 / (1 + t) for t in range(STEPS)]
    gradients = _gradients(5, 8)
    wanted, _ = osgdm_reference(list(gradients), rates, gamma=0.9)
    with jax.enable_x64(True):
        optimizer = curvax.osgdm(lambda t: 0.1 / (1 + t), b1=0.9, weight_decay=decay)
        params = {"kernel": np.ones((5, 8))}
        state, step = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
        for gradient, rate, move in zip(gradients, rates, wanted, strict=True):
            updates, state = step({"kernel": gradient}, state, params)
            expected = -move - rate * decay * np.asarray(params["kernel"])
            assert_close(updates["kernel"], expected, 256)
            params = {"kernel": params["kernel"] + np.asarray(updates["kernel"])}
