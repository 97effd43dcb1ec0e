"""Cautious weight decay and hyperball updates, transcribed in NumPy float64.

Papers: "Cautious Weight Decay" (arXiv:2510.12402), Algorithm 1:
x <- x - eta (u + lambda 1(u x >= 0) x), entry by entry. "Fantastic Pretraining Optimizers and Where
to Find Them II: Hyperball Optimization" (arXiv:2606.16899): with R = ||W_0||_F and
Normalize(X) = X / ||X||_F, W <- R Normalize(W - eta R Normalize(u)).

Both stand behind any direction u: `updates` holds the u of every step (W <- W - eta u is the step
without them), so the u do not react to the parameters, which are iterated here from `parameter`.

Readings chosen:
- Cautious decay: u x = 0 decays, as printed; -0.0 counts as 0. The returned direction is
  u + lambda 1(...) x, without eta, which therefore multiplies the decay too (as printed).
- Hyperball: norms over the whole matrix, no eps. A zero u gives no step, a zero W_0 stays 0 (R is
  0), and W = eta R Normalize(u), the one case that cannot be projected, keeps W.
- Hyperball's D is W - W_new: the learning rate is in it (W <- W - D), because the projection is
  not linear in it. The rate is relative: the step has length eta ||W|| before the projection.
- R is the norm of the parameter before the first step and is never measured again.
"""

import numpy as np


def cautious_weight_decay(updates, parameter, *, learning_rate, weight_decay):
    """Run Algorithm 1 over the updates. States: mask (of this step), W after the step."""
    W = parameter
    directions, states = [], []
    for u in updates:
        mask = u * W >= 0
        D = u + weight_decay * mask * W
        W = W - learning_rate * D
        directions.append(D)
        states.append({"mask": mask, "W": W})
    return directions, states


def hyperball(updates, parameter, *, learning_rate):
    """Run the hyperball step over the updates.

    Returns the directions W - W_new, learning rate included. States: W after the step.
    """
    W, R = parameter, np.sqrt(np.sum(parameter**2))
    directions, states = [], []
    for u in updates:
        norm_u = np.sqrt(np.sum(u**2))
        moved = W - learning_rate * R * u / norm_u if norm_u > 0 else W
        norm = np.sqrt(np.sum(moved**2))
        moved = R * moved / norm if norm > 0 else W
        directions.append(W - moved)
        W = moved
        states.append({"W": W})
    return directions, states
