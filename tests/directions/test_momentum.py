"""Momentum: sums and averages, Nesterov's look ahead, bias correction, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.directions._momentum import descend_with_momentum
from tests.helpers import assert_close, gradients_like, run_scanned

STEPS = 8


def _momentum(gradients, b1, accumulate, nesterov, bias_correction):
    """Outputs and stored momenta, from the definitions."""
    m, outputs, stored = 0.0, [], []
    for t, g in enumerate(gradients, start=1):
        if accumulate == "sum":
            m = b1 * m + g
            outputs.append(b1 * m + g if nesterov else m)
        else:
            m = b1 * m + (1 - b1) * g
            now, following = (1 - b1**t, 1 - b1 ** (t + 1)) if bias_correction else (1.0, 1.0)
            ahead = b1 * m / following + (1 - b1) * g / now
            outputs.append(ahead if nesterov else m / now)
        stored.append(m)
    return outputs, stored


@pytest.mark.parametrize("b1", [0.0, 0.95])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("accumulate", "bias_correction"), [("ema", False), ("ema", True), ("sum", False)]
)
def test_momentum_is_its_formula(b1, nesterov, accumulate, bias_correction):
    tree = {"scalar": np.zeros(()), "batch": np.zeros((2, 3, 4))}
    settings = {"accumulate": accumulate, "nesterov": nesterov, "bias_correction": bias_correction}
    with jax.enable_x64(True):
        gradients = gradients_like(tree, STEPS, dtype=jnp.float64)
        updates, states = run_scanned(curvax.momentum(b1, **settings), gradients, gradients[0])
        for name in tree:
            sequence = [np.asarray(g[name]) for g in gradients]
            outputs, stored = _momentum(sequence, b1, **settings)
            # 1 - b1 loses up to a factor 1 / (1 - b1) of relative precision.
            assert_close([u[name] for u in updates], outputs, condition=1 / (1 - b1))
            assert_close([s.mu[name] for s in states], stored)
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


def test_decay_of_descent_shrinks_weights_and_does_not_enter_the_momentum() -> None:
    params = {"w": jnp.full((2, 3), 4.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = descend_with_momentum(0.1, 0.9, 0.5, None)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(zeros, state, params)
        assert_close(updates, jax.tree.map(lambda w: -0.05 * w, params))
