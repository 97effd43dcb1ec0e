"""Orthogonalization as a transformation: its methods, and matrices that have no polar factor."""

import jax
import numpy as np
import pytest
from helpers import assert_close

import curvax

STEPS = 12


def _gradients(shape, seed=0, steps=STEPS):
    generator = np.random.default_rng([seed, *shape])
    return generator.standard_normal((steps, *shape))


def _first(transformation, gradient):
    """The direction and the state of a first step."""
    return jax.jit(lambda g: transformation.update(g, transformation.init(g)))(gradient)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (6, 6)])
def test_orthogonalizing_by_qr_first_changes_nothing(shape):
    deficient = _gradients(shape)[0]
    deficient[0] = deficient[1]
    batch = np.float32([_gradients(shape)[0], deficient, 0 * deficient])
    results = [_first(curvax.orthogonalize(method), batch)[0] for method in ("svd", "qr_svd")]
    assert_close(results[1], results[0], 256)


@pytest.mark.parametrize("method", ["svd", "qr_svd"])
def test_a_matrix_with_an_infinite_entry_gives_zero_and_leaves_others_alone(method):
    batch = np.stack([_gradients((5, 8))[0]] * 2)
    batch[0, 2, 3] = np.inf
    found, state = _first(curvax.orthogonalize(method), np.float32(batch))
    found = np.asarray(found)
    assert not found[0].any() and found[1].any() and np.isfinite(found).all()
    assert state.failures.tolist() == [1, 0]
