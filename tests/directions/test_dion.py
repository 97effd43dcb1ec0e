"""Dion: what its momentum keeps, its limits, and matrices that have less rank than it asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.directions import _dion
from curvax.transforms.linalg import _qr
from tests.helpers import assert_close, run_scanned

GRADIENTS = np.random.default_rng(0).standard_normal((3, 2, 8, 5)).astype(np.float32)


@pytest.mark.parametrize("side", ["left", "right"])
def test_with_full_rank_and_a_lasting_momentum_dion_becomes_muon(side):
    """A momentum that does not turn: power iteration converges to the polar factor's span."""
    g = np.random.default_rng(0).standard_normal((5, 5))
    with jax.enable_x64(True):
        found, states = run_scanned(curvax.scale_by_dion(5, b1=0.9, side=side), [g] * 200)
        muon, momenta = run_scanned(
            curvax.scale_by_muon(b1=0.9, accumulate="sum", nesterov=False, method="svd"), [g] * 200
        )
    assert_close(states[-1].mu, 0.9 * momenta[-1][0].mu, 64)
    assert_close(found[-1], muon[-1], 64, condition=1e6)


def test_zero_and_rank_one_gradients_give_finite_directions():
    zero, one = np.zeros((8, 5), np.float32), np.float32(np.outer(np.arange(8), np.ones(5)))
    found, states = run_scanned(curvax.scale_by_dion(3), [zero, one, one, zero])
    assert not found[0].any() and np.isfinite(found).all()
    assert_close(np.linalg.norm(found[1]), np.float32(1.0), 64)
    assert_close(np.linalg.norm(states[-1].factor, axis=0), np.ones(3, np.float32), 16)
    assert np.array_equal(states[-1].failures, 0)


def test_a_failed_qr_gives_no_direction_and_keeps_the_factor_of_its_matrix_alone(monkeypatch):
    """The momentum decays whole."""
    dion = curvax.scale_by_dion(3, b1=0.9)
    (_, expected, after), (_, *clean) = run_scanned(dion, list(GRADIENTS))
    update = jax.jit(dion.update)
    _, before = update(GRADIENTS[0], jax.jit(dion.init)(GRADIENTS[0]))

    def fails_for_large(a):
        large = jnp.abs(a).max(axis=(-2, -1), keepdims=True) > 1e3
        return jnp.where(large, jnp.nan, _qr.bases_of(a))

    with monkeypatch.context() as patch:
        patch.setattr(_dion, "bases_of", fails_for_large)
        struck = GRADIENTS[1] * np.float32([1e5, 1])[:, None, None]
        found, state = jax.jit(lambda g, s: dion.update(g, s))(struck, before)
    assert not found[0].any() and state.failures.tolist() == [1, 0]
    assert_close(state.mu[0], 0.9 * (before.mu[0] + struck[0]), 4)
    assert np.array_equal(state.factor[0], before.factor[0])
    assert_close([found[1], state.mu[1]], [expected[1], clean[0].mu[1]], 64)
    last, state = update(GRADIENTS[2], state)
    assert np.linalg.norm(last[0]) == pytest.approx(3**0.5, rel=1e-4)
    assert_close(last[1], after[1], 64, condition=10)


def test_a_rank_above_the_orders_is_clamped():
    with jax.enable_x64(True):
        wide, narrow = (curvax.scale_by_dion(64).init(np.zeros((8, 5), d)) for d in ("f8", "f4"))
    assert wide.factor.shape == (5, 5) and wide.factor.dtype == jnp.float64
    assert_close(narrow.factor, wide.factor, 4)
