"""SWAN, column normalization, whitening, Lars and a Newton-Schulz inverse square root, in NumPy.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension": Section B.7, Eqs. 30-32 (SWAN), Section 3.3 (the operators Norm and Whitening,
without the sqrt(m) and sqrt(n) of Section C.2), Section B.8 (Newton-Schulz), Section B.10, Eq. 34
(Lars). All but Lars are stateless: their states are empty dicts. Float64 throughout.

Readings chosen:
- GradNorm takes mean and standard deviation (population, 1/n) of each row, over its n entries, for
  every shape: no transposition if m > n. A row whose standard deviation is at most n * dtype_eps
  times its largest magnitude is constant up to rounding and gives 0 (ours).
- Whitening, "exact": (G G')^(-1/2) is the pseudo-inverse root where G G' is singular (always if
  m > n; after GradNorm also if m = n, since the rows sum to 0), so the result is U V' of the
  compact SVD; singular values at most max(m, n) * dtype_eps times the largest count as 0.
- Whitening, "newton_schulz": Z_k / sqrt(||A||_F) G with A = G G', Z_k after `steps` steps of B.8,
  5 by default (B.8). No eps: A = 0 gives 0. The same as G f(G' G), since f is a polynomial.
- SWAN's default is "exact": B.7 defines the exact root and names Newton-Schulz as the practice.
- Norm: columns of norm 0 give 0.
- Lars: M <- b1 M + (1 - b1) G, D = phi(||W||) M / ||M||, Frobenius norms, D = 0 if M = 0; no bias
  correction. phi is not specified: the identity by default. b1 = 0.9 is ours.
"""

import numpy as np

EPS64 = float(np.finfo(np.float64).eps)


def newton_schulz_roots(A, steps):
    """B.8: approximations of A^(1/2) and A^(-1/2) for a symmetric positive semidefinite A."""
    A = np.asarray(A, dtype=np.float64)
    norm = np.sqrt(np.sum(A**2))
    if norm == 0:
        return np.zeros_like(A), np.zeros_like(A)
    I = np.eye(len(A))
    Y, Z = A / norm, I
    for _ in range(steps):
        T = (3 * I - Z @ Y) / 2
        Y, Z = Y @ T, T @ Z
    return Y * np.sqrt(norm), Z / np.sqrt(norm)


def newton_schulz_inverse_sqrt(A, steps=5):
    """B.8: A^(-1/2)."""
    return newton_schulz_roots(A, steps)[1]


def normalize_rows(G, dtype_eps=EPS64):
    """GradNorm, Eq. 30."""
    G = np.asarray(G, dtype=np.float64)
    n = G.shape[1]
    centred = G - np.sum(G, axis=1, keepdims=True) / n
    s = np.sqrt(np.sum(centred**2, axis=1) / n)
    kept = s > n * dtype_eps * np.max(np.abs(G), axis=1)
    normalized = np.zeros_like(G)
    normalized[kept] = centred[kept] / s[kept, None]
    return normalized


def whiten(G, method="exact", steps=5, dtype_eps=EPS64):
    """GradWhitening, Eq. 31: (G G')^(-1/2) G."""
    G = np.asarray(G, dtype=np.float64)
    if method == "newton_schulz":
        return newton_schulz_inverse_sqrt(G @ G.T, steps) @ G
    if method != "exact":
        raise ValueError(f"unknown method {method!r}")
    U, sigma, Vt = np.linalg.svd(G, full_matrices=False)
    rank = np.sum(sigma > max(G.shape) * dtype_eps * sigma.max())
    return U[:, :rank] @ Vt[:rank]


def normalize_columns(G):
    """Norm of Section 3.3: G diag(squared column norms)^(-1/2)."""
    G = np.asarray(G, dtype=np.float64)
    norms = np.sqrt(np.sum(G**2, axis=0))
    normalized = np.zeros_like(G)
    normalized[:, norms > 0] = G[:, norms > 0] / norms[norms > 0]
    return normalized


def swan(gradients, *, method="exact", steps=5, dtype_eps=EPS64):
    """Eq. 32: GradWhitening(GradNorm(G))."""
    directions = [whiten(normalize_rows(G, dtype_eps), method, steps, dtype_eps) for G in gradients]
    return directions, [{} for _ in gradients]


def whitening(gradients, *, method="exact", steps=5, dtype_eps=EPS64):
    """Section 3.3, left."""
    return [whiten(G, method, steps, dtype_eps) for G in gradients], [{} for _ in gradients]


def lars(gradients, params, *, b1=0.9, phi=lambda norm: norm):
    """Eq. 34. params holds the weights W at each step. States: M."""
    M = np.zeros(np.shape(gradients[0]))
    directions, states = [], []
    for G, W in zip(gradients, params, strict=True):
        M = b1 * M + (1 - b1) * np.asarray(G, dtype=np.float64)
        norm = np.sqrt(np.sum(M**2))
        scale = phi(np.sqrt(np.sum(np.asarray(W, dtype=np.float64) ** 2)))
        directions.append(scale * M / norm if norm > 0 else np.zeros_like(M))
        states.append({"M": M})
    return directions, states
