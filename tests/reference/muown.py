"""Muown, Muon on directions of rows and Adam on their lengths, in NumPy float64.

Paper: "Muown: Row-Norm Control for Muon Optimization" (arXiv:2605.10797). Code: modded-nanogpt,
track 3, entry #23 (`results/20260508_muown/97782bd6-....txt`, lines 199-344), and
NVIDIA-NeMo/Emerging-Optimizers, `emerging_optimizers/contrib/muown.py` lines 35-198.

Rows are outputs: W = g v / ||v||, row by row, with g the lengths; with the gradient G of W,
    U = W / g, v = U ||v||, g' = rowsum(G U), v' = g / ||v|| (G - U g');
    M <- b1 M + (1 - b1) v', v <- v - eta s polar(M) (s below);
    g <- g - eta Adam(g'), with bias correction (0.9, 0.95, 1e-8);
    W = g v / ||v||, and ||v|| is kept for the next step.
At the start g = ||v|| = the norms of the rows.

Readings chosen:
- nesterov: polar(v' + b1 M) of M <- b1 M + v' (#23); without it an EMA as above (Emerging).
- s is `scale` sqrt(max(m, n)) with scale = 0.2 (#23).
- #23 moves the kept ||v|| towards a target by 3 p^2 - 2 p^3, p = (t - 1) / (steps - 1), instead of
  keeping ||v|| of the step: `norms` = (target, steps).
- Rows of zeros: g = ||v|| = sqrt(0.33), as in #23 (Emerging: 1e-12). Their U is 0, so that g' = 0;
  they leave zero by v'.
- Polar factor: Polar Express' printed table, 12 steps (#23), from X / (||X||_F + 1e-7). In the
  source's bfloat16 the four digits do not matter; the table of `reference.polar_express` has more.
- Decay (Emerging: on g, decoupled) is left out.
"""

import numpy as np

from .lengths import per_step
from .muon import newton_schulz
from .polar_express import polar_express_table


def row_norms(X):
    """The norms of rows, as a column."""
    return np.sqrt(np.sum(X**2, axis=1, keepdims=True))


def muown(
    gradients,
    W,
    *,
    learning_rates,
    b1=0.95,
    adam=(0.9, 0.95, 1e-8),
    nesterov=True,
    scale=0.2,
    norms=None,
    triples=None,
    eps=1e-7,
):
    """Run it over the gradients.

    Returns the weights after each step and the states: g, v_norm, M.
    """
    triples = polar_express_table(12) if triples is None else triples
    start = row_norms(W)
    start = np.where(start > 1e-12, start, np.sqrt(0.33))
    g, v_norm, M = start, start, np.zeros(W.shape)
    first, second = np.zeros_like(g), np.zeros_like(g)
    a1, a2, a_eps = adam
    rates = per_step(learning_rates, len(gradients))
    weights, states = [], []
    for t, G in enumerate(gradients, start=1):
        U = W / g
        to_g = np.sum(G * U, axis=1, keepdims=True)
        to_v = g / v_norm * (G - U * to_g)
        M = b1 * M + (to_v if nesterov else (1 - b1) * to_v)
        D = newton_schulz(to_v + b1 * M if nesterov else M, triples, eps=eps)
        v = U * v_norm - rates[t - 1] * scale * np.sqrt(max(W.shape)) * D
        first, second = a1 * first + (1 - a1) * to_g, a2 * second + (1 - a2) * to_g**2
        step = first / (1 - a1**t) / (np.sqrt(second / (1 - a2**t)) + a_eps)
        g = g - rates[t - 1] * step
        v_norm = np.maximum(row_norms(v), 1e-12)
        W = g * v / v_norm
        if norms is not None:
            target, steps = norms
            p = min((t - 1) / (steps - 1), 1.0)
            v_norm = start + (3 * p**2 - 2 * p**3) * (target - start)
        weights.append(W)
        states.append({"g": g, "v_norm": v_norm, "M": M})
    return weights, states
