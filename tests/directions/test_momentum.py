"""Momentum: sums and averages, Nesterov's look ahead, bias correction, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, run_scanned
from tests.reference.muon import momenta

STEPS = 8


@pytest.mark.parametrize("b1", [0.0, 0.95])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("accumulate", "corrected"), [("ema", False), ("ema", True), ("sum", False)]
)
def test_momentum_follows_the_transcription(b1, nesterov, accumulate, corrected):
    """On leaves of any shape."""
    ours = curvax.momentum(b1, accumulate=accumulate, nesterov=nesterov, bias_correction=corrected)
    tree = {"scalar": np.zeros(()), "batch": np.zeros((2, 3, 4))}
    with jax.enable_x64(True):
        gradients = gradients_like(tree, STEPS, dtype=jnp.float64)
        updates, states = run_scanned(ours, gradients, gradients[0])
    kind = {"ema": "ema", "sum": "trace"}[accumulate]
    for name in tree:
        own = [np.asarray(g[name]) for g in gradients]
        stored, outputs = zip(*momenta(own, b1, nesterov, kind, corrected), strict=True)
        # 1 - b1 loses up to a factor 1 / (1 - b1) of relative precision.
        assert_close(tuple(u[name] for u in updates), outputs, condition=1 / (1 - b1))
        assert_close(tuple(s.mu[name] for s in states), stored)
    assert [int(s.count) for s in states] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("parameters", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_the_dtype_of_the_momentum_is_that_asked_for_at_every_step(dtype, parameters, given):
    params = np.zeros((2, 3), parameters)
    transformation = curvax.momentum(0.9, nesterov=True, bias_correction=True, dtype=dtype)
    state = jax.eval_shape(transformation.init, params)
    update, after = jax.eval_shape(transformation.update, params.astype(given), state, params)
    assert update.dtype == given
    for own in (state, after):
        assert own.mu.dtype == (parameters if dtype is None else dtype)
        assert own.count.dtype == jnp.int32
