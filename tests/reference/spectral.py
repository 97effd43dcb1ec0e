"""Directions of a given spectral norm, and decay by width, transcribed in NumPy float64.

Sources: "A Spectral Condition for Feature Learning" (arXiv:2310.17813): an update of a matrix,
inputs to outputs, has the spectral norm eta sqrt(outputs / inputs); "Hyperparameter Transfer
Enables Consistent Gains of Matrix-Preconditioned Optimizers Across Scales" (arXiv:2512.05620):
any direction D becomes D / ||D||_2 before that factor; independent decay proportional to 1 / width.

Readings chosen:
- ||D||_2 is exact (the paper's code has some power iterations). D = 0 stays 0.
- Weights here are outputs by inputs. For kernels stored inputs by outputs the factor's fraction is
  columns over rows.
- No max(1, .) in the factor, which Muon's sqrt(max(1, outputs / inputs)) has.
"""

import numpy as np


def spectral_norm(X):
    """The largest singular value."""
    return np.linalg.norm(X, 2)


def spectrally_normalized(D):
    """D / ||D||_2."""
    norm = spectral_norm(D)
    return D / norm if norm > 0 else D


def spectral_scale(outputs, inputs):
    """sqrt(outputs / inputs)."""
    return np.sqrt(outputs / inputs)


def decay_for_width(weight_decay, width, base_width):
    """The independent decay of a width, from that of the base width."""
    return weight_decay * base_width / width
