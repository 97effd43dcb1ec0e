"""The limiter of norm growth: by hand, for each matrix alone, after zeros, in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, run_scanned, scanned

EPS = float(np.finfo(np.float32).eps)
BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)


def test_the_limiter_remembers_the_norm_after_limiting():
    x = np.float32([[3.0, 0.0], [0.0, 4.0]])
    sequence = [x, 10 * x, 2 * x, 0 * x, 7 * x, 8 * x]
    updates, states = run_scanned(curvax.limit_norm_growth(1.5), sequence, x)
    norms = [5.0, 7.5, 10.0, 0.0, 35.0, 40.0]
    assert_close([state.norm for state in states], norms, eps=EPS)
    assert_close(updates, [norm / 5 * np.asarray(x, np.float64) for norm in norms])


def test_the_limiter_has_one_norm_for_each_matrix_in_float32():
    tree = {"matrix": np.zeros((3, 4), jnp.bfloat16), "batch": np.zeros((2, 5, 3, 4), jnp.bfloat16)}
    _, (state,) = run_scanned(curvax.limit_norm_growth(), gradients_like(tree, 1), tree)
    assert {name: own.norm.shape for name, own in state.items()} == {"matrix": (), "batch": (2, 5)}
    assert all(own.norm.dtype == jnp.float32 for own in state.values())


def _limited(gamma: float, gradients: np.ndarray) -> np.ndarray:
    return scanned(curvax.limit_norm_growth)(gradients, gamma)[0]


def _norms(matrices: np.ndarray) -> np.ndarray:
    return np.linalg.norm(matrices.astype(np.float64), axis=(-2, -1))


def _jumping() -> np.ndarray:
    """A batch of two whose norms jump by factors between 1e-3 and 1e3."""
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-3, 3, (20, 2, 1, 1))
    return (scales * generator.standard_normal((20, 2, 4, 6))).astype(np.float32)


@pytest.mark.parametrize("gamma", [1.0, 1.01, 3.0])
def test_norms_never_grow_by_more_than_gamma(gamma):
    gradients = _jumping()
    directions = _limited(gamma, gradients)
    given, norms = _norms(gradients), _norms(directions)
    assert np.all(norms[1:] <= gamma * norms[:-1] * (1 + 16 * EPS))
    # Not one bit less than that either: what may stay as it is stays.
    expected = [given[0]]
    for norm in given[1:]:
        expected.append(np.minimum(norm, gamma * expected[-1]))
    assert_close(norms, np.stack(expected), 2.0 * len(gradients), eps=EPS)
    assert_close(np.sum(directions * gradients, axis=(-2, -1)), norms * given, eps=EPS)


def test_norms_of_bfloat16_never_grow_by_more_than_gamma_and_its_rounding():
    gradients = _jumping().astype(jnp.bfloat16)
    directions = _limited(1.01, gradients)
    assert directions.dtype == jnp.bfloat16
    # Rounding does not build up: the norm to compare with is kept in float32.
    ideal = [_norms(gradients[:1])[0]]
    for norm in _norms(gradients)[1:]:
        ideal.append(np.minimum(norm, 1.01 * ideal[-1]))
    norms = _norms(directions)
    assert np.all(norms <= np.stack(ideal) * (1 + BFLOAT16_EPS))


def test_an_infinite_gamma_is_the_identity():
    gradients = _jumping()
    assert_close(_limited(float("inf"), gradients), gradients, 0.0)
    racs, _ = scanned(curvax.scale_by_racs(gamma=np.inf, scale=1.0, limit=np.inf))(gradients)
    scaled, _ = scanned(curvax.scale_by_rows_and_columns(0.9))(gradients)
    assert_close(racs, scaled, 0.0)
