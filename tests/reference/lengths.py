"""Lengths that the rules on the side of the weights share, in NumPy float64."""

import numpy as np


def frobenius(X):
    """The Frobenius norm of a whole array."""
    return np.sqrt(np.sum(X**2))


def schatten_4(X):
    """(sum sigma_i^4)^(1/4) of a matrix: the root of the Frobenius norm of its smaller Gram matrix.

    It lies between the spectral norm and the Frobenius norm.
    """
    gram = X.T @ X if X.shape[0] > X.shape[1] else X @ X.T
    return np.sqrt(frobenius(gram))


def per_step(value, steps):
    """A number for each step, from a number or from one number per step."""
    values = np.broadcast_to(np.float64(value), steps) if np.ndim(value) == 0 else np.float64(value)
    assert len(values) == steps, (len(values), steps)
    return values
