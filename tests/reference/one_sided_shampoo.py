"""Shampoo with one factor and the root of its pseudo-inverse, transcribed in NumPy float64.

One-sided Shampoo (An et al., arXiv:2503.20762, with both momenta) as entries of the optimization
track of modded-nanogpt have it: M <- b1 M + (1 - b1) G; on the side of smaller order, for m <= n,
L <- b2 L + (1 - b2) G G' and D = (L^+)^(1/2) M, else R <- b2 R + (1 - b2) G' G and
D = M (R^+)^(1/2); D <- D rms sqrt(m n) / ||D||_F.

Readings chosen:
- L^+ is the pseudo-inverse: eigenvalues of at most order * 2^-52 * (the largest) count as 0, and so
  do their inverses.
- The root is that of step t = 1 and of t mod K = 0, whose G is in it. No bias correction, no eps:
  constant factors cancel in the last line.
"""

import numpy as np


def root_of_pseudo_inverse(L):
    """(L^+)^(1/2)."""
    values, U = np.linalg.eigh((L + L.T) / 2)
    kept = values > len(L) * np.finfo(np.float64).eps * values.max()
    inverse = np.zeros_like(values)
    inverse[kept] = 1 / np.sqrt(values[kept])
    return (U * inverse) @ U.T


def one_sided_shampoo(gradients, *, b1=0.95, b2=0.95, K=10, rms=0.2):
    """Run it over the gradients, each (m, n). States: M, L (of the smaller order)."""
    m, n = np.shape(gradients[0])
    M, L, root = np.zeros((m, n)), np.zeros((min(m, n),) * 2), np.eye(min(m, n))
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = b1 * M + (1 - b1) * G
        L = b2 * L + (1 - b2) * (G @ G.T if m <= n else G.T @ G)
        if t == 1 or t % K == 0:
            root = root_of_pseudo_inverse(L)
        D = root @ M if m <= n else M @ root
        norm = np.sqrt(np.sum(D**2))
        directions.append(D * (rms * np.sqrt(m * n) / norm) if norm > 0 else D)
        states.append({"M": M, "L": L})
    return directions, states
