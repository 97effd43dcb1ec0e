"""Schatten norms, and spectral norms as their limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg._schatten import SPECTRAL, schatten_norms
from tests.helpers import assert_close, with_spectrum
from tests.reference import lengths
from tests.reference.spectral import spectral_norm

_norms = jax.jit(schatten_norms, static_argnums=1)


@pytest.mark.parametrize("squarings", [0, 1, 3])
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (1, 5)])
def test_they_are_sums_of_powers_of_singular_values(squarings, shape):
    x = np.random.default_rng(0).standard_normal((3, *shape))
    p = 4 * 2**squarings
    with jax.enable_x64(True):
        found = np.asarray(_norms(x, squarings))[:, 0, 0]
    singular = np.linalg.svd(x, compute_uv=False)
    assert_close(found, np.sum(singular**p, axis=-1) ** (1 / p), 64)
    if not squarings:
        assert_close(found, np.array([lengths.schatten_4(y) for y in x]), 64)


@pytest.mark.parametrize("values", [[1.0, 0.9, 0.1], [1.0] * 6, [1.0], [1.0, 0.999, 0.999, 1e-6]])
def test_spectral_norms_are_met_from_above(values):
    x = with_spectrum(jax.random.key(0), 6, 9, values)
    found, exact = float(_norms(jnp.float32(x), SPECTRAL)[0, 0]), spectral_norm(x)
    most = len(values) ** (1 / (4 * 2**SPECTRAL))
    assert exact * (1 - 1e-5) <= found <= exact * most * (1 + 1e-5)


@pytest.mark.parametrize("squarings", [0, SPECTRAL])
def test_huge_and_tiny_matrices_have_norms_and_what_is_not_finite_shows(squarings):
    """Beside zeros, whose norm is 0."""
    x = np.random.default_rng(0).standard_normal((7, 4, 7)).astype(np.float32)
    sizes = np.array([1.0, 1e-30, 1e-10, 1e10, 1e30, 0.0, np.nan], np.float32)
    found = np.float64(_norms((x[0] * sizes[:, None, None]).astype(np.float32), squarings))[:, 0, 0]
    assert found[:5] / sizes[:5] == pytest.approx(found[0], rel=1e-5)
    assert found[5] == 0 and np.isnan(found[6])
