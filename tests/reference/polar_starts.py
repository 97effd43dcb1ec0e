"""Starts of Newton-Schulz and its iteration on the Gram matrix, transcribed in NumPy float64.

Sources: AOL: Prach and Lampert, "Almost-Orthogonal Layers ..." (arXiv:2208.03160), used for Muon
by "Turbo-Muon" (arXiv:2512.04632). Gram Newton-Schulz: Zhang, Amsel, Chen and Dao, "Gram
Newton-Schulz: A Fast, Hardware-Aware Newton-Schulz Algorithm for Muon" (2026), the listing of its
README.

Starts X_0, all with ||X_0||_2 <= 1:
- "frobenius", "schatten": X / ||X||_p with the Schatten norm (sum sigma_i^p)^(1/p), p = 2 or 4
  (||X' X||_F^(1/2)). Larger p start closer to 1.
- "aol": X D with D = diag(sum_j |X' X|_ij)^(-1/2) of a tall matrix, and D X with X X' of a wide or
  square one, as Turbo-Muon does.

Readings chosen:
- AOL's D is not undone: the iteration goes to the polar factor of X D, which is not that of X
  unless D is a multiple of I or the columns are orthogonal. Turbo-Muon accepts that.
- No eps: what is 0 stays 0.
- An older version of the official code, which Emerging-Optimizers has as "aol", begins with
  (4.0098, -7.0585, 2.4635); it turns singular values above 0.88 negative, and is not taken.
- The listing counts t = 1 ... 5 and restarts at t = 3: X becomes Q X there. Its last line says
  Q_4 X; it must be Q_5 X. Its lines for R and Q keep the order of the factors; all of them are
  polynomials of R and commute.
- With no restart the result is p(X X') X by one product alone. The iterated R may leave the
  positive semidefinite matrices by rounding, which the coefficients amplify; restarts are there
  for that. In exact arithmetic restarts change nothing, nor does the Gram form.
- Square matrices go through the Gram matrix too (the official code takes the plain form there).
  Matrices with more rows than columns are transposed before and after.
"""

import numpy as np

from .muon import COEFFICIENTS, momenta, newton_schulz_from, triples_of

TURBO_MUON = (  # official code, for AOL's start: the last four of Jiacheng You's five
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def aol(X):
    """D X, or X D of a tall matrix."""
    if X.shape[0] > X.shape[1]:
        return aol(X.T).T
    sums = np.sum(np.abs(X @ X.T), axis=1, keepdims=True)
    return X * np.divide(1.0, np.sqrt(sums), out=np.zeros_like(sums), where=sums > 0)


def start_of(X, start):
    """X_0 of the iteration."""
    if start == "aol":
        return aol(X)
    p = {"frobenius": 2, "schatten": 4}[start]
    norm = np.sum(np.linalg.svd(X, compute_uv=False) ** p) ** (1 / p)
    return X / norm if norm > 0 else X


def gram_newton_schulz(X, coefficients=COEFFICIENTS, steps=5):
    """The iteration of `newton_schulz_from` on R = X X', restarted after the second step."""
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    R, Q = X @ X.T, np.eye(X.shape[0])
    for t, (a, b, c) in enumerate(triples_of(coefficients, steps), start=1):
        if t == 3:
            X = Q @ X
            R, Q = X @ X.T, np.eye(X.shape[0])
        Z = b * R + c * R @ R
        Q = Q @ Z + a * Q
        RZ = R @ Z + a * R
        R = Z @ RZ + a * RZ
    X = Q @ X
    return X.T if transposed else X


def muon_from(gradients, *, start="frobenius", coefficients=COEFFICIENTS, steps=5, gram=False):
    """Muon (`reference.muon`) with another start, on the Gram matrix or not. States: M, X_0."""
    iterated = gram_newton_schulz if gram else newton_schulz_from
    directions, states = [], []
    for M, M_hat in momenta(gradients):
        X_0 = start_of(M_hat, start)
        directions.append(iterated(X_0, coefficients, steps))
        states.append({"M": M, "X_0": X_0})
    return directions, states
