"""The limiter of norm growth: for each matrix alone, after zeros, in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, scanned

EPS = float(np.finfo(np.float32).eps)


def norms(matrices: np.ndarray) -> np.ndarray:
    return np.linalg.norm(matrices.astype(np.float64), axis=(-2, -1))


def jumping() -> np.ndarray:
    """A batch of two whose norms jump by factors between 1e-3 and 1e3; one pauses."""
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-3, 3, (20, 2, 1, 1))
    scales[8, 0] = 0
    return (scales * generator.standard_normal((20, 2, 4, 6))).astype(np.float32)


@pytest.mark.parametrize(
    ("gamma", "dtype"), [(1.0, "float32"), (1.01, "float32"), (3.0, "float32"), (1.01, "bfloat16")]
)
def test_norms_grow_by_gamma_at_most_and_no_less(gamma, dtype):
    """By that of the step before, as limited; after a matrix of zeros any norm may come.

    The norm to compare with is kept in float32, so that rounding to bfloat16 does not build up.
    """
    gradients = jumping().astype(jnp.dtype(dtype))
    directions, state = scanned(curvax.limit_norm_growth)(gradients, gamma)
    kept = state.norm
    given, expected = norms(gradients), [norms(gradients)[0]]
    for norm in given[1:]:
        most = np.where(expected[-1] > 0, gamma * expected[-1], np.inf)
        expected.append(np.minimum(norm, most))
    expected, found = np.stack(expected), norms(directions)
    assert directions.dtype == dtype and kept.dtype == np.float32
    assert_close(kept, expected, 2.0 * len(gradients), eps=EPS)
    unit = float(jnp.finfo(dtype).eps)
    assert np.all(found <= expected * (1 + max(16 * EPS, unit)))
    if dtype == "float32":
        assert_close(found, expected, 2.0 * len(gradients), eps=EPS)
        assert_close(np.sum(directions * gradients, axis=(-2, -1)), found * given, eps=EPS)
        grown = found[1:] / np.where(found[:-1] > 0, found[:-1], np.inf)
        assert np.all(grown <= gamma * (1 + 16 * EPS))


def test_an_infinite_gamma_is_the_identity():
    gradients = jumping()
    assert np.array_equal(scanned(curvax.limit_norm_growth)(gradients, np.inf)[0], gradients)
    racs, _ = scanned(curvax.scale_by_racs(gamma=np.inf, scale=1.0, limit=np.inf))(gradients)
    scaled, _ = scanned(curvax.scale_by_rows_and_columns(0.9))(gradients)
    assert np.array_equal(racs, scaled)
