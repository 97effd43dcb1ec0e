"""Normalization of columns."""

import jax
import numpy as np
from helpers import assert_close
from reference import swan as swan_reference

import curvax

STEPS = 12


def _gradients(shape, seed=0, steps=STEPS):
    generator = np.random.default_rng([seed, *shape])
    return generator.standard_normal((steps, *shape))


def _first(transformation, gradient):
    """The direction and the state of a first step."""
    return jax.jit(lambda g: transformation.update(g, transformation.init(g)))(gradient)


def test_columns_are_normalized_as_in_the_transcription():
    g = _gradients((5, 8))[0]
    g[:, 3] = 0
    found, _ = _first(curvax.normalize_columns(), np.float32(g))
    assert_close(found, swan_reference.normalize_columns(g), 16)
