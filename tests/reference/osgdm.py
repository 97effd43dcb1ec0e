"""OSGDM, orthogonal SGD with momentum, transcribed in NumPy float64.

Paper: "SUMO: Subspace-Aware Moment-Orthogonalization ..." (003), Section 2, paragraph on OSGDM:
O = orth(G), M <- gamma M + eta O, W <- W - M, with orth(G) = (G G^T)^(-1/2) G.

Readings chosen:
- The learning rate eta of the step enters the momentum, so that under a schedule each O keeps
  the rate of its own step. The direction D is therefore the M after the step, learning rate
  included, and W <- W - D: this reference alone cannot leave the learning rate out.
- M starts at 0.
- orth is U V^T of the compact SVD: (G G^T)^(-1/2) is a pseudo-inverse root, so zero singular
  values stay zero: those of at most max(m, n) * 2^-52 * (the largest).
- The default gamma = 0.9 is ours (the paper prints none).
"""

import numpy as np

from .muon import orthogonal_factor


def osgdm(gradients, learning_rates, *, gamma=0.9):
    """Run OSGDM over the gradients, each (m, n), with a learning rate per step.

    Returns the directions M (W <- W - M) and the states {O, M}, each (m, n).
    """
    M = np.zeros(np.shape(gradients[0]))
    directions, states = [], []
    for eta, G in zip(learning_rates, gradients, strict=True):
        O = orthogonal_factor(G)
        M = gamma * M + eta * O
        directions.append(M)
        states.append({"O": O, "M": M})
    return directions, states
