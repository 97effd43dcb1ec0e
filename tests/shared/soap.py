"""Gradients for SOAP and Eigen-Adam, and their trajectories.

Where a statistic's rank is below its order, its null space has no basis of its own, and later
directions depend on the one that the decomposition happens to return. So trajectories are compared
on sides where statistics have full rank from the first step: for `(m, n)` with `m <= n` the left.
`growing_gradients` have bases of their own on both sides.
"""

import functools

import numpy as np

import curvax
from tests.helpers import scanned
from tests.reference.soap import eigenvectors

STEPS = 30


def soap_gradients(shape, seed=0):
    generator = np.random.default_rng(seed)
    mean = np.outer(np.arange(shape[0]) - 2, np.ones(shape[1]))
    return [1.5 * mean + generator.standard_normal(shape) for _ in range(STEPS)]


def growing_gradients(shape):
    """Gradients whose statistics are diagonal until both have full rank, and then noisy.

    Until then their null spaces have no basis but the unit vectors, in the order of the first
    decomposition. Their sizes fall in this order, so that it stays that of the eigenvalues.
    """
    m, n = sorted(shape)
    blocks, sizes = -(-n // m), 1.35 ** -np.arange(n)
    noise = np.random.default_rng(1).standard_normal((STEPS, m, n))
    found = 0.02 * sizes[:m, None] * noise * sizes
    found[:blocks] = 0
    for t in range(len(found)):
        columns = np.arange(n)[t % blocks * m :][:m]
        found[t][columns % m, columns] += sizes[columns]
    order = np.argmax(np.abs(eigenvectors(found[0].T @ found[0])), axis=0)
    found = found[:, :, np.argsort(order)]
    return list(found if shape[0] <= shape[1] else found.swapaxes(1, 2))


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
