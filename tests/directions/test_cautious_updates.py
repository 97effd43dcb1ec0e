"""Cautious updates, and MARS' corrected gradient by Optax's parts, against transcriptions."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.reference.cautious_updates import cautious_updates
from tests.reference.mars import corrected_gradients, mars_factor
from tests.reference.muon import momenta
from tests.shared.transcriptions import HARD, Case, assert_follows


def masked(gradients: Any, scale: Any) -> Any:
    found = [m for m, _ in momenta(gradients, 0.9, nesterov=False, bias_correction=False)]
    return cautious_updates(found, gradients, scale=scale), None


@pytest.mark.parametrize(("rescale", "scale"), [(True, "count"), (False, None)])
def test_trajectories_equal_the_transcription(rescale: bool, scale: Any) -> None:
    ours = curvax.cautious_updates(curvax.momentum(0.9), rescale=rescale)
    assert_follows(Case(ours, functools.partial(masked, scale=scale), HARD))


def test_vectors_are_scaled_as_a_whole_and_batches_matrix_by_matrix() -> None:
    draw = np.random.default_rng(0)
    gradients = [draw.standard_normal(7).astype(np.float32) for _ in range(6)]
    ours = curvax.cautious_updates(curvax.momentum(0.9))
    found, _ = run_scanned(ours, gradients)
    expected, _ = masked([np.float64(g) for g in gradients], "count")
    assert_close(found, [np.float32(x) for x in expected], 16)


def test_tiny_numbers_of_one_sign_agree_and_nan_shows() -> None:
    ours = curvax.cautious_updates(optax.scale(1e-20), rescale=False)
    g = jnp.array([1e-15, -1e-15, jnp.nan])
    found = ours.update(g, ours.init(g))[0]
    assert np.sign(found[:2]).tolist() == [1.0, -1.0] and np.isnan(found[2])


@pytest.mark.parametrize("clip", [None, 1.0])
def test_mars_is_optimistic_gradient_descent_of_optax(clip: float | None) -> None:
    """The line of `docs/combinations.md`; of one array the global norm is its own."""
    factor = mars_factor(0.025, 0.95)
    corrected = optax.scale_by_optimistic_gradient(1.0, factor)
    ours = corrected if clip is None else optax.chain(corrected, optax.clip_by_global_norm(clip))
    options: dict[str, Any] = {"factor": factor, "first": "same", "clip": clip}
    alone = {"square": HARD["square"]}
    assert_follows(Case(ours, lambda g: (corrected_gradients(g, **options), None), alone))
