"""QK-clip and MuonClip, transcribed in NumPy float64.

Paper: "Kimi K2: Open Agentic Intelligence" (arXiv:2507.20534), Algorithm 1. For each weight
(n, m): M <- mu M + G, O = NewtonSchulz(M) sqrt(max(n, m)) 0.2, W <- W - eta (O + lambda W). Then
for each attention head h, with S_h = max over the batch and i, j of q_i . k_j / sqrt(d), which the
forward pass has computed: if S_h > tau, then with gamma = tau / S_h
W_qc^h <- W_qc^h gamma^(1/2), W_kc^h <- W_kc^h gamma^(1/2), W_qr^h <- W_qr^h gamma.

Readings chosen:
- Section 2.1 has gamma_h = min(1, tau / S_h) and the exponents alpha and 1 - alpha of W_q and W_k,
  with alpha = 1/2.
- The weights are those after the step; S_h belongs to the weights before it, as the forward pass
  saw them. So clipped weights have logits of tau only as far as the step did not change them.
- "c" are the components of each head ("content"), "r" the rotary ones. W_kr, which all heads share,
  is left alone, so that W_qr takes the whole gamma. Attention without rotary components has "qc"
  and "kc" only. The rotation itself is left out of the logits.
- S_h is a maximum, not a maximum of magnitudes; where it is at most tau, nothing is clipped.
- Weights are (width, heads, d_component); W_kr is (width, d_component). Muon sees the matrix
  (width, heads d_component).
"""

import numpy as np

from .muon import newton_schulz

EXPONENTS = {"qc": 0.5, "kc": 0.5, "qr": 1.0}


def largest_logits(weights, X):
    """S_h of one batch X (batch, time, width): an array (heads,)."""
    queries = np.einsum("btw,whd->bthd", X, weights["qc"])
    keys = np.einsum("btw,whd->bthd", X, weights["kc"])
    logits = np.einsum("bihd,bjhd->bhij", queries, keys)
    d = weights["qc"].shape[2]
    if "qr" in weights:
        rotary = np.einsum("btw,whd->bthd", X, weights["qr"])
        logits = logits + np.einsum("bihd,bjd->bhij", rotary, X @ weights["kr"])
        d += weights["qr"].shape[2]
    return np.max(logits, axis=(0, 2, 3)) / np.sqrt(d)


def clip(weights, S, tau):
    """Lines 12 to 18: the weights of the heads with S_h > tau, scaled."""
    clipped = {name: np.array(W, dtype=np.float64) for name, W in weights.items()}
    for h, S_h in enumerate(S):
        if S_h > tau:
            gamma = tau / S_h
            for name, exponent in EXPONENTS.items():
                if name in clipped:
                    clipped[name][:, h] *= gamma**exponent
    return clipped


def muon_clip(
    gradients, batches, parameters, *, learning_rate, tau, mu=0.95, weight_decay=0.1, rms=0.2
):
    """Run Algorithm 1: `gradients` and `batches` have an entry per step.

    Returns the weights after every step, and the S (heads,) that every step clipped by.
    """
    weights = {name: np.array(W, dtype=np.float64) for name, W in parameters.items()}
    M = {name: np.zeros(W.shape) for name, W in weights.items()}
    trajectory, logits = [], []
    for G, X in zip(gradients, batches, strict=True):
        S = largest_logits(weights, X)
        stepped = {}
        for name, W in weights.items():
            M[name] = mu * M[name] + G[name]
            matrix = M[name].reshape(W.shape[0], -1)
            O = newton_schulz(matrix)
            O = O.reshape(W.shape) * np.sqrt(max(matrix.shape)) * rms
            stepped[name] = W - learning_rate * (O + weight_decay * W)
        weights = clip(stepped, S, tau)
        trajectory.append(weights)
        logits.append(S)
    return trajectory, logits
