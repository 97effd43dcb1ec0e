"""Averages of weights to evaluate: tail EMA and primal averaging, in NumPy float64.

Tail EMA: modded-nanogpt, track 3, entry #45 (`results/20260611_tailema_2720_submission/README.md`)
and #46 (`results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py` lines 921-936 and 966-975):
E is a copy of the weights after step `start`; after later steps E <- E + (W - E) / tau; what is
evaluated is (1 - lambda) W + lambda E. Training does not see it. tau = 150, lambda = 0.6; start and
end 2400 and 2900 (#46), 2000 and none (#45); the token embedding is left out.

Primal averaging: "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs"
(arXiv:2512.17131, GPA), and facebookresearch/optimizers, `gpa/README.md` (Background):
Y_t = mu_y X_t + (1 - mu_y) Z_t, where the gradient is taken; Z_{t+1} = Z_t + d_t(Y_t), the step of
the inner optimizer; X_{t+1} = mu_x X_t + (1 - mu_x) Z_{t+1}, which is evaluated. X_0 = Z_0 = W.
mu_y = 0.7, mu_x = 0.9967. Schedule-Free is the case with 1 - mu_x = 1 / (t + 1), t = 1, 2, ...

Readings chosen:
- Steps count from 1 here: weights[0] is what step 1 left. Before `start` W itself is evaluated; at
  `start` E = W. The first step that E does not see is `end`; E is kept after it.
- Decay of primal averaging is part of the inner step, which starts at Z with the gradient of Y:
  z_{t+1} = (1 - eta lambda) z_t + ... of the paper.
- mu_x is a number or one number per step.
"""

import numpy as np

from .lengths import per_step


def tail_ema(weights, *, tau=150.0, share=0.6, start=2400, end=None):
    """What is evaluated after each step, from the weights after each step; and E (or None)."""
    E, evaluated, averages = None, [], []
    for t, W in enumerate(weights, start=1):
        if t >= start and (end is None or t < end):
            E = W if E is None else E + (W - E) / tau
        evaluated.append(W if E is None else (1 - share) * W + share * E)
        averages.append(E)
    return evaluated, averages


def primal_averaging(W, step, steps, *, mu_x=0.9967, mu_y=0.7):
    """Run `step`, (Z, Y, t) -> Z, from t = 0 on.

    Returns what is evaluated after each step, X, and the states: Z and the point Y of the step.
    """
    X, Z = W, W
    evaluated, states = [], []
    for t, mu in enumerate(per_step(mu_x, steps)):
        Y = mu_y * X + (1 - mu_y) * Z
        Z = step(Z, Y, t)
        X = mu * X + (1 - mu) * Z
        evaluated.append(X)
        states.append({"Z": Z, "Y": Y})
    return evaluated, states


def schedule_free_weights(steps):
    """mu_x of the uniform average of Z_1, ..., Z_t: 1 - 1 / (t + 1), t = 0, 1, ..."""
    return 1 - 1 / np.arange(1.0, steps + 1)
