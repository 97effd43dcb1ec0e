"""Matrices of one root mean square, or of one spectral norm."""

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, run_scanned
from tests.reference.muon import momenta
from tests.reference.spectral import spectral_norm, spectrally_normalized
from tests.shared.transcriptions import HARD


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(np.float64(x) ** 2, axis=(-2, -1)))


@pytest.mark.parametrize("name", cells(["muon", "osgdm", "swan", "sumo"], of=2))
def test_optimizers_of_orthogonal_directions_move_by_the_root_mean_square_times_the_rate(name):
    """In the first step, where no momentum has summed up."""
    options = {"swan": {}, "sumo": {"b1": 0.0, "rank": 64}}.get(name, {"b1": 0.0})
    if name != "swan":
        options |= {"method": "svd"}
    optimizer = getattr(curvax, name)(0.5, consistent_rms=0.2, **options)
    draw = np.random.default_rng(0)
    wide, tall = draw.standard_normal((6, 9)), 1e-6 * draw.standard_normal((9, 4))
    params = {"wide": {"kernel": wide}, "tall": {"kernel": tall}}
    updates, _ = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params), params)
    # SWAN's rows have a mean of zero, which takes one of the directions if rows are short.
    for x in jax.tree.leaves(updates):
        full = 1 if name != "swan" or x.shape[-1] > x.shape[-2] else 1 - 1 / x.shape[-1]
        assert rms(x) == pytest.approx(0.1 * full**0.5, rel=1e-4)


@pytest.mark.parametrize(("norm", "size"), [("rms", rms), ("spectral", spectral_norm)])
def test_huge_and_tiny_matrices_of_a_batch_get_the_length_and_zeros_stay(norm, size):
    """What is not finite stays so, without a part in the others."""
    x = np.random.default_rng(0).standard_normal((5, 5, 3)).astype(np.float32)
    x *= np.array([1e-30, 1.0, 1e30, 0.0, 1.0], np.float32)[:, None, None]
    x[4, 0, 0] = np.nan
    three = curvax.normalize_matrices(3.0, norm=norm)
    found = np.asarray(three.update(x, three.init(x))[0], np.float64)
    rel = {"rms": 1e-5, "spectral": 1e-3}[norm]
    assert [float(size(y)) for y in found[:3]] == pytest.approx([3.0] * 3, rel=rel)
    assert not found[3].any() and np.isnan(found[4]).all()


@pytest.mark.parametrize("name", HARD)
def test_momenta_get_the_spectral_norm_of_the_transcription(name: str) -> None:
    """Up to the distance of the Schatten norm by products, which is above: at most 0.1 %."""
    gradients = HARD[name]
    ours = optax.chain(curvax.momentum(0.9), curvax.normalize_matrices(1.0, norm="spectral"))
    with jax.enable_x64(True):
        found, _ = run_scanned(ours, list(gradients))
    for place in np.ndindex(gradients.shape[1:-2]):
        own = momenta([g[place] for g in gradients], 0.9, False, "ema", False)
        for x, (m, _) in zip(found, own, strict=True):
            assert_close(x[place], spectrally_normalized(m), 1, eps=1e-3)
            # The same direction, exactly.
            assert_close(spectrally_normalized(x[place]), spectrally_normalized(m), 64)
            assert 0.999 < spectral_norm(x[place]) < 1 + 1e-12
