"""NorMuon, transcribed in NumPy float64.

Paper: "NorMuon: Making Muon more efficient and scalable" (arXiv:2510.05491), Algorithm 1, for
parameters (m, n) with one neuron per row:
M <- b1 M + (1 - b1) G, O = NS5(M), v <- b2 v + (1 - b2) mean_columns(O * O), of shape (m, 1),
O_hat = O / (sqrt(v) + eps), W <- W - eta lambda W - 0.2 eta sqrt(m n) / ||O_hat||_F O_hat.

Readings chosen:
- neurons="rows" is the paper's (outputs by inputs); neurons="columns" is for kernels stored inputs
  by outputs, of which each column has its v, of shape (1, n).
- scale="rms" is the printed one: the direction's RMS is 0.2. scale="norm" gives it the norm of O
  (official code, without the factor sqrt(max(1, m / n)) that it multiplies with then).
- eps is outside the root (official code: 1e-10; the paper prints no number). Where sqrt(v) + eps is
  0, the row of O is 0 and stays 0. O_hat = 0 gives 0.
- v starts at 0 without bias correction, as printed; with eps = 0 a correction would cancel in the
  scale. Momentum: no Nesterov and no bias correction, as printed; the official code has Nesterov,
  G (1 - b1) + b1 M. Both are options of `reference.muon`, whose Newton-Schulz is used.
- The direction has the scale in it and leaves out eta and the decay.
"""

import numpy as np

from .muon import momenta, newton_schulz


def normalize_neurons(O, v, b2, eps, scale, axis):
    """Lines of Algorithm 1 after NS5: the scaled direction and v."""
    v = b2 * v + (1 - b2) * np.mean(O**2, axis=axis, keepdims=True)
    denominator = np.broadcast_to(np.sqrt(v) + eps, O.shape)
    O_hat = np.divide(O, denominator, out=np.zeros_like(O), where=denominator > 0)
    norm = np.sqrt(np.sum(O_hat**2))
    if norm == 0:
        return O_hat, v
    wanted = {"rms": 0.2 * np.sqrt(O.size), "norm": np.sqrt(np.sum(O**2))}[scale]
    return wanted / norm * O_hat, v


def normuon(
    gradients,
    *,
    b1=0.95,
    b2=0.95,
    eps=1e-10,
    scale="rms",
    neurons="rows",
    nesterov=False,
    bias_correction=False,
):
    """Run NorMuon over the gradients, each (m, n). States: M (m, n), v (m, 1) or (1, n), O."""
    axis = {"rows": 1, "columns": 0}[neurons]
    m, n = np.shape(gradients[0])
    v = np.zeros((m, 1) if neurons == "rows" else (1, n))
    directions, states = [], []
    for M, M_hat in momenta(gradients, b1, nesterov, bias_correction=bias_correction):
        O = newton_schulz(M_hat)
        D, v = normalize_neurons(O, v, b2, eps, scale, axis)
        directions.append(D)
        states.append({"M": M, "v": v, "O": O})
    return directions, states
