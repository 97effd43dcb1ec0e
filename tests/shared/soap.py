"""Gradients for SOAP and Eigen-Adam, and their trajectories.

Where a statistic's rank is below its order, its null space has no basis of its own, and later
directions depend on the one that the decomposition happens to return. So trajectories are compared
on sides where statistics have full rank from the first step: for `(m, n)` with `m <= n` the left.
"""

import functools

import numpy as np
from helpers import scanned

import curvax

STEPS = 30


def soap_gradients(shape, seed=0):
    """Noise about a mean of well separated directions."""
    generator = np.random.default_rng(seed)
    mean = np.outer(np.arange(shape[0]) - 2, np.ones(shape[1]))
    return [1.5 * mean + generator.standard_normal(shape) for _ in range(STEPS)]


@functools.cache
def by_period(make):
    """What `make` makes of a refresh with a period."""
    return lambda period: make(curvax.every(period))


def soap_trajectory(transformation, gradients, dtype="float64", period=1):
    """Directions and states of all steps, as arrays of NumPy.

    Of a transformation, or of what it makes of a refresh with this period.
    """
    make = by_period(transformation) if callable(transformation) else transformation
    return scanned(make)(np.asarray(np.stack(gradients), dtype), period)


@functools.cache
def one_eigen_adam():
    """One optimizer for several tests on matrices of 6×9, so that it is compiled once."""
    return curvax.scale_by_eigen_adam(b3=0.95, refresh=4)
