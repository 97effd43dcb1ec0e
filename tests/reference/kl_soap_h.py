"""KL-SOAP-H, KL-SOAP on hyperballs in its published order, transcribed in NumPy float64.

Source: modded-nanogpt, track 3, `results/20260511_klsoap_h_lr_power_decay/
train_gpt_simple_klsoap_h_lr_power_decay.py` lines 163-303 (entries #19 and #25), of which
marin-community/marin, `experiments/grug/moe/klsoaph.py`, is a port (pull request 5729).

First step: L = G G' / n, R = G' G / m, Q_L and Q_R their eigenvectors by descending eigenvalue,
eigenvalues d_L = d_R = 0.1; no step of the weights, and the moments stay 0.
Each later step, in this order:
1. P = Q_L' G Q_R; m <- b1 m + (1 - b1) P; v <- b2 v + (1 - b2) P^2; u = Q_L (m / (sqrt(v) + eps))
   Q_R', in the bases that the step before left;
2. L <- b L + (1 - b) / n (G Q_R) diag(1 / d_R) (G Q_R)', R alike with d_L, both with the d from
   before; d_L <- b d_L + (1 - b) mean over columns of P^2 / d_R, d_R alike;
3. if t - 1 is a multiple of K: Q_L <- Q of QR(L Q_L), Q_R alike, without a sort; m turns with the
   bases, v and d stay;
4. the hyperball step with u (`reference.hyperball`).
b1 = 0.95, b2 = b = 0.9, K = 1, eps = 1e-8, eta = 0.018.

Readings chosen:
- What `reference.kl_shampoo.kl_soap` has otherwise: bases before the direction, bases I at the
  start, no eps.
- K counts from the step after the first. Marin's port counts the first too (t mod K), with K = 5
  at first and 1 later.
- 1 / sqrt(d) is at most 4000, as in the source, and d is stored as that root is.
- `bases`: on non-square matrices the first statistics have no full rank, and their null spaces no
  basis of their own: the trajectory is not a function of the gradients. The bases that step t
  (t = 1, 2, ...) leaves can be given as bases[t] = (Q_L, Q_R); others are computed. Signs do not
  matter.
"""

import numpy as np

from .hyperball import hyperball_step
from .lengths import frobenius, per_step
from .soap import eigenvectors, fix_signs


def _blended(d, target, b):
    """The new eigenvalues: their inverse root is at most 4000."""
    return np.maximum(b * d + (1 - b) * target, 4000.0**-2)


def kl_soap_h(
    gradients,
    W,
    *,
    learning_rates,
    b1=0.95,
    b2=0.9,
    b=0.9,
    K=1,
    eps=1e-8,
    initial=0.1,
    bases=None,
):
    """Run it over the gradients, each (m, n).

    Returns the weights after each step and the states: m and v in the bases, L, R, Q_L, Q_R, d_L,
    d_R, and the direction u.
    """
    rows, columns = W.shape
    radius = frobenius(W)
    bases = {} if bases is None else bases
    rates = per_step(learning_rates, len(gradients))
    m, v, u = np.zeros(W.shape), np.zeros(W.shape), np.zeros(W.shape)
    d_L, d_R = np.full(rows, initial), np.full(columns, initial)
    L, R, Q_L, Q_R = np.eye(rows), np.eye(columns), np.eye(rows), np.eye(columns)
    weights, states = [], []
    for t, G in enumerate(gradients, start=1):
        if t == 1:
            L, R = G @ G.T / columns, G.T @ G / rows
            Q_L, Q_R = bases.get(1, (eigenvectors(L), eigenvectors(R)))
        else:
            P = Q_L.T @ G @ Q_R
            m, v = b1 * m + (1 - b1) * P, b2 * v + (1 - b2) * P**2
            u = Q_L @ (m / (np.sqrt(v) + eps)) @ Q_R.T
            right, left = (G @ Q_R) / np.sqrt(d_R), (Q_L.T @ G) / np.sqrt(d_L)[:, None]
            L = b * L + (1 - b) / columns * right @ right.T
            R = b * R + (1 - b) / rows * left.T @ left
            new_L, new_R = np.mean(P**2 / d_R, axis=1), np.mean(P**2 / d_L[:, None], axis=0)
            d_L, d_R = _blended(d_L, new_L, b), _blended(d_R, new_R, b)
            if (t - 1) % K == 0:
                old = Q_L, Q_R
                new_Q_L = fix_signs(np.linalg.qr(L @ Q_L)[0])
                new_Q_R = fix_signs(np.linalg.qr(R @ Q_R)[0])
                Q_L, Q_R = bases.get(t, (new_Q_L, new_Q_R))
                m = Q_L.T @ old[0] @ m @ old[1].T @ Q_R
            W = hyperball_step(W, u, rates[t - 1], radius)
        weights.append(W)
        states.append(
            {"m": m, "v": v, "L": L, "R": R, "Q_L": Q_L, "Q_R": Q_R, "d_L": d_L, "d_R": d_R, "u": u}
        )
    return weights, states
