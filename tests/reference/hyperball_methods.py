"""MuonH and AdamH, Muon and Adam on hyperballs, transcribed in NumPy float64.

Source: marin-community/marin, `lib/levanter/src/levanter/optim/muonh.py` (scale_with_muonh) and
`adamh.py` (scale_by_adamh); modded-nanogpt, track 3, `results/20260430_muonh/
train_gpt_simple_muonh.py` lines 170-233 and `results/20260430_adamh/` (the log 6b19a86b-..., lines
174-222). Each direction u is followed by W <- R Normalize(W - eta R Normalize(u))
(`reference.hyperball`).

- MuonH: M <- b1 M + G, u = NewtonSchulz(G + b1 M). A scale of u, such as
  sqrt(max(1, outputs / inputs)), cancels.
- AdamH: u = m_hat / (sqrt(v_hat) + eps) with bias correction; the output layer has it too.

Readings chosen:
- Defaults are Marin's: MuonH b1 = 0.95, eps = 1e-8 and its five "quintic" triples
  (`reference.saturated_muon.QUINTIC`); track 3 has twelve times (2, -1.5, 0.5). AdamH b1 = 0.9,
  b2 = 0.95, eps = 1e-8.
- Marin clips the norm of all gradients together at 1 before the method; that is left out.
- The gradients do not react to the weights.
"""

import numpy as np

from .hyperball import hyperball
from .muon import momenta, newton_schulz
from .saturated_muon import QUINTIC


def muon_h(gradients, W, *, learning_rates, b1=0.95, nesterov=True, coefficients=QUINTIC, eps=1e-8):
    """Run MuonH over the gradients. Returns the weights after each step."""
    moments = momenta(gradients, b1, nesterov, "trace")
    updates = [newton_schulz(M_hat, coefficients, eps=eps) for _, M_hat in moments]
    return hyperball(updates, W, learning_rates=learning_rates)


def adam_directions(gradients, *, b1=0.9, b2=0.95, eps=1e-8, bias_correction=True):
    """Adam's directions; without bias correction as track 3's auxiliary Adam."""
    m, v = np.zeros(np.shape(gradients[0])), np.zeros(np.shape(gradients[0]))
    directions = []
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        first, second = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
        directions.append(m / first / (np.sqrt(v / second) + eps))
    return directions


def adam_h(gradients, W, *, learning_rates, b1=0.9, b2=0.95, eps=1e-8):
    """Run AdamH over the gradients. Returns the weights after each step."""
    updates = adam_directions(gradients, b1=b1, b2=b2, eps=eps)
    return hyperball(updates, W, learning_rates=learning_rates)
