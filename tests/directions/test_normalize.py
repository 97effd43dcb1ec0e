"""Lengths of columns and rows, and one rule for matrices: updates of RMS `c`."""

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, run_scanned
from tests.reference.dion import normalize_columns


def _normal(t: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(t).standard_normal(shape)


GRADIENTS = [{"wide": _normal(t, 2, 6, 9), "tall": 1e-6 * _normal(t, 9, 4)} for t in range(6)]
DIRECTIONS = {
    "orthogonalized": curvax.scale_by_muon(),
    "of low rank": curvax.scale_by_dion(2),
    "normuon": curvax.scale_by_muon(b2=0.9),
    "whitened": curvax.scale_by_kl_shampoo(refresh=2),
    "one root": curvax.scale_by_asgo(),
    "soap before muon": optax.chain(curvax.scale_by_soap(refresh=2), curvax.orthogonalize()),
    "rows and columns": curvax.scale_by_racs(),
}


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(np.float64(x) ** 2, axis=(-2, -1)))


@pytest.mark.parametrize("name", cells(DIRECTIONS, of=4))
def test_updates_behind_any_direction_have_the_root_mean_square_that_is_asked_for(name):
    direction = optax.chain(DIRECTIONS[name], curvax.normalize_matrices(0.2))
    found, _ = run_scanned(direction, GRADIENTS)
    for x in jax.tree.leaves(found):
        assert rms(x) == pytest.approx(0.2, rel=1e-5)


def test_consistent_rms_is_the_same_for_orthogonal_directions():
    exact = curvax.scale_by_muon(method="svd")
    found, expected = (
        run_scanned(optax.chain(exact, scale(0.2)), GRADIENTS[:2])[0][-1]
        for scale in (curvax.scale_by_shape, curvax.normalize_matrices)
    )
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", cells(["muon", "osgdm", "swan", "sumo"], of=2))
def test_optimizers_of_orthogonal_directions_move_by_the_root_mean_square_times_the_rate(name):
    """In the first step, where no momentum has summed up."""
    options = {"swan": {}, "sumo": {"b1": 0.0, "rank": 64}}.get(name, {"b1": 0.0})
    if name != "swan":
        options |= {"method": "svd"}
    optimizer = getattr(curvax, name)(0.5, consistent_rms=0.2, **options)
    wide, tall = GRADIENTS[0].values()
    params = {"wide": {"kernel": wide[0]}, "tall": {"kernel": tall}}
    updates, _ = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params), params)
    # SWAN's rows have a mean of zero, which takes one of the directions if rows are short.
    for x in jax.tree.leaves(updates):
        full = 1 if name != "swan" or x.shape[-1] > x.shape[-2] else 1 - 1 / x.shape[-1]
        assert rms(x) == pytest.approx(0.1 * full**0.5, rel=1e-4)


def test_zero_matrices_stay_zero_and_non_finite_ones_stay_not_finite():
    normalize = curvax.normalize_matrices(0.2)
    x = np.stack([np.full((2, 2), value, np.float32) for value in (0.0, np.nan, 1e30)])
    updates, _ = normalize.update(x, normalize.init(x))
    found = np.asarray(updates)
    assert not found[0].any() and np.isnan(found[1]).all()
    assert rms(found[2]) == pytest.approx(0.2)


def test_columns_are_normalized_as_in_the_transcription():
    g = np.random.default_rng(0).standard_normal((5, 8))
    g[:, 3] = 0
    (found,), _ = run_scanned(curvax.normalize_columns(), [np.float32(g)])
    assert_close(found, normalize_columns(g), 16)


def test_rows_are_normalized_as_columns_of_the_transpose():
    g = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    g[1] = 0.0
    (rows,), _ = run_scanned(curvax.normalize_rows(), [g])
    (columns,), _ = run_scanned(curvax.normalize_columns(), [g.T])
    assert_close(rows, columns.T, 16)
    assert_close(np.linalg.norm(rows, axis=1), np.array([1.0, 0.0, 1.0]), 16)
