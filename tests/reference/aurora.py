"""Aurora's balanced polar factor, transcribed in NumPy float64.

Source: tilde-research/aurora-release, `src/aurora.py`; the same in modded-nanogpt, track 3, entry
#17 (`results/20260505_aurora/README.md`, and the log 298f02bc-..., lines 186-212). For tall X
(m, n), m > n: D = diag(1 / ||rows||); U = polar(D X); for each further round
D <- D (n / m / ||rows of U||^2)^beta and U = polar(D X) again. Wide matrices are transposed before
and after; square ones have the plain polar factor. Two rounds and beta = 0.5.

The goal is the U with orthonormal columns whose rows all have the norm sqrt(n / m). Rows are equal
in the limit of many rounds only.

Readings chosen:
- D scales the longer side: outputs of a matrix with more outputs than inputs, else inputs. One
  round is MuonEq on that side.
- polar="exact" is U V' of the compact SVD; "newton_schulz" are the 12 iterations of (2, -1.5, 0.5)
  of entry #17, from X / (||X||_F + 1e-7), which converge.
- eps = 1e-7: the norms of rows of X, and of U, are at least eps, so that a row of zeros stays 0.
- Momentum as in the source: M <- b1 M + (1 - b1) G, and (1 - b1) G + b1 M. The source's factor
  sqrt(max(1, outputs / inputs)) and its decay are not in the direction.
"""

import numpy as np

from .muon import momenta, newton_schulz, orthogonal_factor

CONVERGING = (2.0, -1.5, 0.5)


def polar_factor(X, polar="exact"):
    """The polar factor by one of the two ways."""
    if polar == "exact":
        return orthogonal_factor(X)
    return newton_schulz(X, CONVERGING, 12, 1e-7)


def balanced_polar(X, *, rounds=2, beta=0.5, polar="exact", eps=1e-7):
    """Aurora's direction of the matrix X."""
    m, n = X.shape
    if m == n:
        return polar_factor(X, polar)
    if m < n:
        return balanced_polar(X.T, rounds=rounds, beta=beta, polar=polar, eps=eps).T
    D = 1 / np.maximum(np.sqrt(np.sum(X**2, axis=1, keepdims=True)), eps)
    U = polar_factor(D * X, polar)
    for _ in range(rounds - 1):
        squares = np.maximum(np.sum(U**2, axis=1, keepdims=True), eps**2)
        D = D * (n / m / squares) ** beta
        U = polar_factor(D * X, polar)
    return U


def aurora(gradients, *, b1=0.95, nesterov=True, rounds=2, beta=0.5, polar="newton_schulz"):
    """Run it over the gradients, each (m, n). States: M."""
    directions, states = [], []
    for M, M_hat in momenta(gradients, b1, nesterov, "ema", bias_correction=False):
        directions.append(balanced_polar(M_hat, rounds=rounds, beta=beta, polar=polar))
        states.append({"M": M})
    return directions, states
