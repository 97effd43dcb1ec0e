"""SWAN against its transcription, what it does not see, and ranks in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference import swan as swan_reference


def _gradients(*shape, steps=4):
    return np.random.default_rng(shape).standard_normal((steps, *shape))


PRINTED = curvax.polar.newton_schulz(coefficients=(1.5, -0.5, 0.0), norm="gram", eps=0.0)


@pytest.mark.parametrize("method", ["exact", "newton_schulz"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_swan_follows_the_transcription(method, shape):
    gradients = _gradients(*shape)
    wanted, _ = swan_reference.swan(list(gradients), method=method)
    with jax.enable_x64(True):
        ours = "svd" if method == "exact" else PRINTED
        found, _ = run_scanned(curvax.scale_by_swan(method=ours), gradients)
        assert_close(found, wanted, 256)


def test_swan_is_invariant_to_scales_and_to_offsets_of_rows():
    g = np.float32(_gradients(5, 8)[0])
    (plain, scaled, shifted), _ = run_scanned(curvax.scale_by_swan(), [g, 8 * g, g + 2])
    assert_close(scaled, plain, 16)
    assert_close(shifted, plain, 256)


def test_swan_in_bfloat16_keeps_the_rank():
    """Rows sum to 0, so the rank of (8, 6) is 5: rounding must not fill the sixth direction."""
    g = _gradients(8, 6)[0].astype(jnp.bfloat16)
    (direction,), _ = run_scanned(curvax.scale_by_swan(), [g])
    singular = np.linalg.svd(np.asarray(direction, np.float64))[1]
    assert singular[4] > 0.9 and singular[5] < 0.05
