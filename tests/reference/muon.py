"""Muon, transcribed in NumPy float64.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (Newton-Schulz
quintic and its coefficients); "Towards Efficient Optimizer Design for LLM ...", Eq. 33 (EMA);
"ASGO ...", Eq. 11 (trace B = mu B + G and the compact SVD); "SUMO ...", Section 2 (trace); for
Nesterov and bias correction of the EMA the convention of `optax.contrib.scale_by_muon`.

Momentum, t = 1, 2, ...:
- "ema":   M <- b1 M + (1 - b1) G. Orthogonalized matrix without Nesterov: M / (1 - b1^t); with
  Nesterov: b1 M / (1 - b1^(t+1)) + (1 - b1) G / (1 - b1^t). Without bias correction the
  denominators are 1.
- "trace": M <- b1 M + G. Without Nesterov: M; with Nesterov: G + b1 M. It has no bias
  correction, and the flag is ignored.

Readings chosen:
- The state is named M (m_t in Eq. 33, B_t in ASGO's Eq. 11, M^(t) in SUMO, mu in Optax).
- The Frobenius norm is used in X0 = M / (||M||_F + eps), eps added outside (the ASGO paper uses
  (2, -1.5, 0.5) for 50 steps and for the root of V; here the triple is for the quintic on M).
- A list of triples gives one iteration per triple, and `steps` is ignored.
- exact: singular values at most max(m, n) * 2^-52 * (the largest) count as zero and stay zero.
- The direction has no scale that depends on the shape, such as sqrt(max(1, n / m)).
"""

import numpy as np

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.


def newton_schulz(X, coefficients=COEFFICIENTS, steps=5, eps=1e-8):
    """Quintic Newton-Schulz iteration on X / (||X||_F + eps)."""
    return newton_schulz_from(X / (np.sqrt(np.sum(X**2)) + eps), coefficients, steps)


def triples_of(coefficients, steps):
    """A triple for each iteration."""
    return [coefficients] * steps if np.ndim(coefficients) == 1 else coefficients


def newton_schulz_from(X, coefficients=COEFFICIENTS, steps=5):
    """The quintic iteration from X as it is."""
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    for a, b, c in triples_of(coefficients, steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.T if transposed else X


def orthogonal_factor(X, size=0):
    """U V^T of the compact SVD of X: zero singular values stay zero.

    `size` is max(m, n) of the gradient, where X is smaller.
    """
    U, sigma, Vt = np.linalg.svd(X, full_matrices=False)
    cutoff = max(*X.shape, size) * np.finfo(np.float64).eps
    rank = np.sum(sigma > cutoff * sigma.max())
    return U[:, :rank] @ Vt[:rank]


def momenta(gradients, b1=0.95, nesterov=True, momentum="ema", bias_correction=True):
    """Yields the state M and the matrix that is orthogonalized, step by step."""
    M = np.zeros(np.shape(gradients[0]))
    for t, G in enumerate(gradients, start=1):
        if momentum == "trace":
            M = b1 * M + G  # ASGO Eq. 11
            M_hat = G + b1 * M if nesterov else M
        else:
            M = b1 * M + (1 - b1) * G  # Eq. 33
            now = 1 - b1**t if bias_correction else 1.0
            following = 1 - b1 ** (t + 1) if bias_correction else 1.0
            M_hat = b1 * M / following + (1 - b1) * G / now if nesterov else M / now
        yield M, M_hat


def muon(
    gradients,
    *,
    b1=0.95,
    nesterov=True,
    momentum="ema",
    bias_correction=True,
    coefficients=COEFFICIENTS,
    steps=5,
    exact=False,
    eps=1e-8,
):
    """Run Muon over the gradients, each (m, n). States: M (m, n)."""
    directions, states = [], []
    for M, M_hat in momenta(gradients, b1, nesterov, momentum, bias_correction):
        if exact:
            D = orthogonal_factor(M_hat)
        else:
            D = newton_schulz(M_hat, coefficients, steps, eps)
        directions.append(D)
        states.append({"M": M})
    return directions, states
