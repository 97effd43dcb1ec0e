"""NAMO and NAMO-D, Muon at an adaptive length, transcribed in NumPy float64.

Paper: arXiv:2602.17080. Code: marin-community/marin, `lib/levanter/src/levanter/optim/namo.py`
(scale_with_namo, scale_with_namod; a port of minxin-zhg/namo).

M <- b1 M + (1 - b1) G, A = b1 M + (1 - b1) G (Nesterov) or M; v <- b2 v + (1 - b2) ||G||^2;
a = eta sqrt(1 - b2^t) / (1 - b1^t) ||A|| / sqrt(v + eps), at most 1;
W <- W - lambda a W - min(a 0.2 sqrt(max(m, n)), 1) NewtonSchulz(A).
NAMO-D has a v and an a for each column, ||.|| of columns; the quotients ||A|| / sqrt(v + eps) are
clipped to [c, 1 / c] times their mean before eta comes in; 1 - lambda a is at least 0.

Readings chosen:
- b1 = 0.95, b2 = 0.99, eps = 1e-8 inside the root, c = 0.75, Newton-Schulz with Marin's quintic
  triples and eps 1e-8.
- ||.|| is the Frobenius norm. The bias of A is corrected by 1 - b1^t, also with Nesterov.
- Columns are inputs of weights outputs by inputs, as in Marin.
- The code's 1e-12 beside 1 - b1^t is left out.
"""

import numpy as np

from .lengths import per_step
from .muon import momenta, newton_schulz
from .saturated_muon import QUINTIC


def namo(
    gradients,
    W,
    *,
    learning_rates,
    weight_decay=0.0,
    b1=0.95,
    b2=0.99,
    nesterov=True,
    columns=False,
    clip=0.75,
    eps=1e-8,
    scale=0.2,
    coefficients=QUINTIC,
    ns_eps=1e-8,
):
    """Run NAMO, or NAMO-D with columns=True, over the gradients.

    Returns the weights after each step and the states: M, v and a.
    """
    axis = 0 if columns else None
    rates = per_step(learning_rates, len(gradients))
    moments = momenta(gradients, b1, nesterov, "ema", bias_correction=False)
    v = np.zeros((1, W.shape[1]) if columns else (1, 1))
    weights, states = [], []
    for t, (M, A) in enumerate(moments, start=1):
        G = gradients[t - 1]
        v = b2 * v + (1 - b2) * np.sum(G**2, axis=axis, keepdims=True)
        quotient = np.sqrt(np.sum(A**2, axis=axis, keepdims=True)) / np.sqrt(v + eps)
        if columns:
            quotient = np.clip(quotient, clip * np.mean(quotient), np.mean(quotient) / clip)
        wanted = rates[t - 1] * np.sqrt(1 - b2**t) / (1 - b1**t) * quotient
        a = np.minimum(wanted, 1.0)
        kept = np.maximum(1 - weight_decay * a, 0.0) if columns else 1 - weight_decay * a
        length = np.minimum((wanted if columns else a) * scale * np.sqrt(max(W.shape)), 1.0)
        W = kept * W - length * newton_schulz(A, coefficients, eps=ns_eps)
        weights.append(W)
        states.append({"M": M, "v": v, "a": a})
    return weights, states
