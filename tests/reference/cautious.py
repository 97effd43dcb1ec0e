"""Cautious weight decay and hyperball updates, transcribed in NumPy float64.

Papers: "Cautious Weight Decay" (arXiv:2510.12402), Algorithm 1:
x <- x - eta (u + lambda 1(u x >= 0) x), entry by entry. "Fantastic Pretraining Optimizers and Where
to Find Them II: Hyperball Optimization" (arXiv:2606.16899): with R = ||W_0||_F and
Normalize(X) = X / ||X||_F, W <- R Normalize(W - eta R Normalize(u)).

Both stand behind any direction u: `updates` holds the u of every step (W <- W - eta u is the step
without them), so the u do not react to the parameters, which are iterated here from `parameter`.

Readings chosen:
- Cautious decay: u x = 0 decays, as printed; at_zero=False takes the strict inequality. The product
  itself is compared, so that it must not underflow; -0.0 counts as 0. The returned direction is
  u + lambda 1(...) x, without eta, which therefore multiplies the decay too (as printed).
- Hyperball: norms over the whole matrix, no eps. A zero u gives no step, a zero W_0 stays 0 (R is
  0), and W = eta R Normalize(u), the one case that cannot be projected, keeps W.
- Hyperball's D is W - W_new: the learning rate is in it (W <- W - D), because the projection is
  not linear in it. The rate is relative: the step has length eta ||W|| before the projection.
- radius=None is ||W_0||_F, of the parameter before the first step and never measured again; a
  number replaces it (then the first step also brings W to that norm). project=False leaves the
  outer normalization out: updates of relative length, W <- W - eta ||W_0|| Normalize(u).
"""

import numpy as np


def _rates(learning_rates, steps):
    return np.broadcast_to(np.asarray(learning_rates, dtype=np.float64), (steps,))


def cautious_weight_decay(
    updates, parameter, *, learning_rates, weight_decay, at_zero=True, cautious=True
):
    """Run Algorithm 1 over the updates; learning_rates: one number, or one per step.

    cautious=False is plain decoupled decay. States: mask (of this step), W after the step.
    """
    W = np.asarray(parameter, dtype=np.float64)
    directions, states = [], []
    for eta, u in zip(_rates(learning_rates, len(updates)), updates, strict=True):
        u = np.asarray(u, dtype=np.float64)
        mask = u * W >= 0 if at_zero else u * W > 0
        if not cautious:
            mask = np.ones(W.shape, dtype=bool)
        D = u + weight_decay * mask * W
        W = W - eta * D
        directions.append(D)
        states.append({"mask": mask, "W": W})
    return directions, states


def hyperball(updates, parameter, *, learning_rates, radius=None, project=True):
    """Run the hyperball step over the updates; learning_rates: one number, or one per step.

    Returns the directions W - W_new, learning rate included. States: W after the step.
    """
    W = np.asarray(parameter, dtype=np.float64)
    R = np.sqrt(np.sum(W**2)) if radius is None else radius
    directions, states = [], []
    for eta, u in zip(_rates(learning_rates, len(updates)), updates, strict=True):
        u = np.asarray(u, dtype=np.float64)
        norm_u = np.sqrt(np.sum(u**2))
        moved = W - eta * R * u / norm_u if norm_u > 0 else W
        norm = np.sqrt(np.sum(moved**2))
        if project:
            moved = R * moved / norm if norm > 0 else W
        directions.append(W - moved)
        W = moved
        states.append({"W": W})
    return directions, states
