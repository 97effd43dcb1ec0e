"""MuonEq, Muon with equilibrated momentum, transcribed in NumPy float64.

Paper: "MuonEq: Balancing Before Orthogonalization with Lightweight Equilibration"
(arXiv:2603.28254): with r the row sums and c the column sums of the squares of the momentum, and
eps added to them, the matrix that Newton-Schulz gets is
diag(r)^(-1/2) M (R, the default), M diag(c)^(-1/2) (C), or diag(r)^(-1/2) M diag(c)^(-1/2) (RC).
Code: MaeChd/muon-eq, `llm-opt-baseline-npu/llama2_pretrain/optimizers/muon_variants/muoneq.py`.

Readings chosen:
- Weights are outputs by inputs: R normalizes outputs, which are the columns of kernels stored
  inputs by outputs.
- As in the code: it is the Nesterov update G + b1 M of M <- b1 M + G that is equilibrated; RC uses
  the sums of the matrix as it came for both sides; eps = 1e-8.
- With eps = 0, a row or column of zeros stays 0.
- Neither the scale 0.2 sqrt(max(m, n)) nor the decay is in the direction.
"""

import numpy as np

from .muon import COEFFICIENTS, momenta, newton_schulz


def _reciprocal_root(x):
    return np.divide(1.0, np.sqrt(x), out=np.zeros_like(x), where=x > 0)


def equilibrated(M, form="R", eps=1e-8):
    """M with normalized rows, columns or both."""
    scaled = M
    if "R" in form:
        scaled = _reciprocal_root(np.sum(M**2, axis=1, keepdims=True) + eps) * scaled
    if "C" in form:
        scaled = scaled * _reciprocal_root(np.sum(M**2, axis=0, keepdims=True) + eps)
    return scaled


def muon_eq(
    gradients,
    *,
    form="R",
    b1=0.95,
    nesterov=True,
    momentum="trace",
    bias_correction=False,
    eps=1e-8,
    coefficients=COEFFICIENTS,
    steps=5,
    ns_eps=1e-7,
):
    """Run MuonEq, form "R", "C" or "RC", over the gradients, each (m, n). States: M."""
    directions, states = [], []
    for M, M_hat in momenta(gradients, b1, nesterov, momentum, bias_correction):
        directions.append(
            newton_schulz(equilibrated(M_hat, form, eps), coefficients, steps, ns_eps)
        )
        states.append({"M": M})
    return directions, states
