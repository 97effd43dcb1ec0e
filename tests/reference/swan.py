"""SWAN and column normalization, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension": Section B.7, Eqs. 30-32 (SWAN), Section 3.3 (the operator Norm, without the
sqrt(m) of Section C.2), Section B.8 (Newton-Schulz). It has no state.

Readings chosen:
- GradNorm takes mean and standard deviation (population, 1/n) of each row, over its n entries, for
  every shape: no transposition if m > n. A row whose standard deviation is at most n * 2^-52 times
  its largest magnitude is constant up to rounding and gives 0 (ours). A row of one entry would
  always give 0; it is not centred, and gives its sign (ours).
- Whitening, "exact": (G G')^(-1/2) is the pseudo-inverse root where G G' is singular (always if
  m > n; after GradNorm also if m = n, since the rows sum to 0), so the result is U V' of the
  compact SVD; singular values at most max(m, n) * 2^-52 times the largest count as 0.
- Whitening, "newton_schulz": Z_k / sqrt(||A||_F) G with A = G G', Z_k after `steps` steps of B.8,
  5 by default (B.8). No eps: A = 0 gives 0. The same as G f(G' G), since f is a polynomial.
- SWAN's default is "exact": B.7 defines the exact root and names Newton-Schulz as the practice.
"""

import numpy as np

from .muon import orthogonal_factor
from .soap import EPS64


def newton_schulz_inverse_sqrt(A, steps=5):
    """B.8: A^(-1/2), approximately, of a symmetric positive semidefinite A."""
    norm = np.sqrt(np.sum(A**2))
    if norm == 0:
        return np.zeros_like(A)
    I = np.eye(len(A))
    Y, Z = A / norm, I
    for _ in range(steps):
        T = (3 * I - Z @ Y) / 2
        Y, Z = Y @ T, T @ Z
    return Z / np.sqrt(norm)


def normalize_rows(G):
    """GradNorm, Eq. 30."""
    n = G.shape[1]
    centred = G
    for _ in range(2 if n > 1 else 0):  # once more without the rounding error of a large mean
        centred = centred - np.sum(centred, axis=1, keepdims=True) / n
    s = np.sqrt(np.sum(centred**2, axis=1) / n)
    kept = s > n * EPS64 * np.max(np.abs(G), axis=1)
    normalized = np.zeros_like(G)
    normalized[kept] = centred[kept] / s[kept, None]
    return normalized


def whiten(G, method):
    """GradWhitening, Eq. 31: (G G')^(-1/2) G."""
    if method == "newton_schulz":
        return newton_schulz_inverse_sqrt(G @ G.T) @ G
    return orthogonal_factor(G)


def swan(gradients, *, method="exact"):
    """Eq. 32: GradWhitening(GradNorm(G))."""
    return [whiten(normalize_rows(G), method) for G in gradients], [{} for _ in gradients]
