"""Dion, transcribed in NumPy float64.

Paper: "Dion: Distributed Orthonormalized Updates" (arXiv:2504.05295), Algorithm 1 with the power
iteration of Algorithm 2, for parameters (m, n), outputs by inputs, and rank r:
B = M + G, P = orth(B Q), R = B' P, M <- B - (1 - mu) P R', Q <- ColumnNormalize(R),
W <- W - eta sqrt(m / n) P Q'.

Readings chosen:
- Q_0 (n, r) comes from outside (the official code draws N(0, 1) entries and does not orthogonalize
  them; only its column space matters for the first P).
- orth is the Q of the reduced QR decomposition. The signs of its columns cancel in P R' and P Q'.
- eps is added to the column norms in ColumnNormalize (official code: 1e-8; the paper has none). A
  column of R that is 0 gives a column 0 of Q, and so no update from it at this step.
- B = 0 gives D = 0 and keeps M and Q (official code); by the formulas Q would be 0 forever after.
- The power iteration is on B itself. transposed=True runs on B' (P is then (n, r), Q is (m, r)), as
  the official code does for some shardings; rank below min(m, n) makes this another method.
- The direction leaves out eta, sqrt(m / n) and the weight decay.
"""

import numpy as np


def normalize_columns(R, eps=0.0):
    """R / (norms of its columns + eps); a column 0 stays 0."""
    norms = np.broadcast_to(np.sqrt(np.sum(R**2, axis=0)) + eps, R.shape)
    return np.divide(R, norms, out=np.zeros_like(R), where=norms > 0)


def dion(gradients, Q_0, *, mu=0.95, eps=0.0, transposed=False):
    """Run Algorithm 1 over the gradients, each (m, n). States: M (m, n), Q, P, R.

    Q_0 is (n, r), or (m, r) if transposed.
    """
    m, n = np.shape(gradients[0])
    Q = Q_0
    P, R = np.zeros((n if transposed else m, Q.shape[1])), np.zeros(Q.shape)
    M = np.zeros((m, n))
    directions, states = [], []
    for G in gradients:
        M = M + G  # B
        D = np.zeros((m, n))
        if np.any(M != 0):
            B = M.T if transposed else M
            P = np.linalg.qr(B @ Q)[0]
            R = B.T @ P
            M = B - (1 - mu) * P @ R.T
            Q = normalize_columns(R, eps)
            D = P @ Q.T
            if transposed:
                M, D = M.T, D.T
        directions.append(D)
        states.append({"M": M, "Q": Q, "P": P, "R": R})
    return directions, states
