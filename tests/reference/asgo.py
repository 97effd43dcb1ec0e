"""ASGO and DASGO, transcribed in NumPy float64.

Paper: "ASGO: Adaptive Structured Gradient Optimization". Algorithm 1 (theoretical), Algorithm 2
(practical, App. B), Eq. 4 ("from momentum", App. C.3), Algorithm 3 (DASGO, App. B), head-wise
query/key matrices (App. B, "Special Design for Transformers"). Defaults: Table 4 (GPT-2).

Readings chosen:
- side="smaller" is the printed "if m < n": left, else right, so a square matrix is preconditioned
  on the right (the text, point (i), leaves m = n open). Line 13 prints I_n on both sides; the
  identity has the order of V. Algorithm 1 is always on the left, Algorithm 3 always on the right.
- Rows of W are neurons (section 5: "all input weights into a neuron, i.e., as a row of W"), so
  that the right side is the inputs; the library's matrices are transposed. Appendix B's query and
  key R^(n x hd) have heads as columns: there, and there alone, columns are the outputs.
- t runs from 0, so mod(t, period) = 0 refreshes the root at the first step.
- No bias correction (none is printed); M and V start at zero.
- Roots by eigendecomposition, eigenvalues floored at 0. With eps = 0 (App. C.3, Prop. 1) the
  inverse is taken on the range only: eigenvalues of V at most order(V) * 2^-52 * (the largest)
  give 0.
- Eq. 4 prints no period; period > 1 keeps lines 12-16 of Algorithm 2. The text says that b2 = 0
  alone makes it Muon; eps = 0 and period = 1 are needed too (as in Prop. 1).
- DASGO's diag(v + eps) adds eps to every entry of v; with eps = 0 a zero entry of v gives 0.
- A 1-D parameter is passed as a matrix with one column or one row: V is then 1 x 1.
- Heads are contiguous groups of d columns (the paper only says "reshape").
"""

import numpy as np

from .shampoo import as_it_is


def _spectrum(V, eps):
    """Eigenvalues floored at 0, eigenvectors, which ones to invert (eps = 0: the range)."""
    d, U = np.linalg.eigh((V + V.T) / 2)
    d = np.maximum(d, 0.0)
    return d, U, (d > len(V) * np.finfo(np.float64).eps * d.max()) | (eps > 0)


def _reciprocal(x, keep):
    return np.divide(1.0, x, out=np.zeros_like(x), where=keep)


def inverse_sqrt(V, eps):
    """(V + eps I)^(-1/2); with eps = 0 on the range of V only."""
    d, U, keep = _spectrum(V, eps)
    return (U * _reciprocal(np.sqrt(d + eps), keep)) @ U.T


def asgo_theoretical(gradients, *, eps=1e-6):
    """Algorithm 1. States: V and Lambda = V^(1/2) + eps I, both (m, m)."""
    m = np.shape(gradients[0])[0]
    V = np.zeros((m, m))  # line 2
    directions, states = [], []
    for G in gradients:  # lines 3-5
        V = V + G @ G.T  # line 6
        d, U, keep = _spectrum(V, eps)
        root = np.sqrt(d) + eps
        Lambda = (U * root) @ U.T  # line 7
        directions.append((U * _reciprocal(root, keep)) @ (U.T @ G))  # line 8
        states.append({"V": V, "Lambda": Lambda})
    return directions, states


def asgo(
    gradients,
    *,
    b1=0.9,
    b2=0.95,
    eps=1e-6,
    period=1,
    side="smaller",
    from_momentum=False,
    kept=as_it_is,
):
    """Algorithm 2. States: M (m, n); V and Lambda_inv, (m, m) on the left or (n, n)."""
    m, n = np.shape(gradients[0])
    left = m < n if side == "smaller" else side == "left"  # lines 7 and 17
    M, V = np.zeros((m, n)), kept(np.zeros((m, m) if left else (n, n)), "start", 0)  # line 2
    directions, states = [], []
    for t, G in enumerate(gradients):  # lines 3-5, t = 0, 1, ...
        M = b1 * M + (1 - b1) * G  # line 6
        X = M if from_momentum else G  # Eq. 4 | lines 8, 10
        gram = (1 - b2) * X @ X.T if left else (1 - b2) * X.T @ X
        V = kept(b2 * V + gram, "factor", t + 1)  # lines 8, 10
        if t % period == 0:  # line 12
            Lambda_inv = kept(inverse_sqrt(V, eps), "root", t)  # line 13; else line 15 keeps it
        directions.append(Lambda_inv @ M if left else M @ Lambda_inv)  # lines 18, 20
        states.append({"M": M, "V": V, "Lambda_inv": Lambda_inv})
    return directions, states


def asgo_from_momentum(gradients, **options):
    """Algorithm 2 with Eq. 4: V from M M^T or M^T M. States as in `asgo`."""
    return asgo(gradients, from_momentum=True, **options)


def asgo_headwise(gradients, heads, **kw):
    """`asgo` on each of `heads` matrices (n, d) cut from the columns of gradients (n, heads * d).

    Directions have the gradients' shape; each state array is stacked along a leading axis of heads.
    """
    parts = [np.split(np.float64(G), heads, axis=1) for G in gradients]
    runs = [asgo([part[h] for part in parts], **kw) for h in range(heads)]
    steps = range(len(gradients))
    directions = [np.concatenate([run[0][t] for run in runs], axis=1) for t in steps]
    names = runs[0][1][0]
    states = [{name: np.stack([run[1][t][name] for run in runs]) for name in names} for t in steps]
    return directions, states


def dasgo(gradients, *, b1=0.9, b2=0.99, eps=1e-6):
    """Algorithm 3. States: M (m, n) and v (n,)."""
    m, n = np.shape(gradients[0])
    M, v = np.zeros((m, n)), np.zeros(n)  # line 2
    directions, states = [], []
    for G in gradients:  # lines 3-5
        M = b1 * M + (1 - b1) * G  # line 6
        v = b2 * v + (1 - b2) * np.diag(G.T @ G)  # line 7
        scale = _reciprocal(np.sqrt(v + eps), v + eps > 0)
        directions.append(M @ np.diag(scale))  # line 8
        states.append({"M": M, "v": v})
    return directions, states
