"""EMA-Nesterov around any optimizer, transcribed in NumPy float64.

Paper: "EMA-Nesterov: Stabilizing Nesterov's Lookahead for Accelerated Deep Learning Optimization"
(arXiv:2605.25395): with A_t the whole step of the inner optimizer, gradient and decay included,
W_{t+1} = A_t(W_t + beta_t m_t), m_{t+1} = gamma m_t + (1 - gamma) (W_{t+1} - W_t), m_0 = 0.
Code: modded-nanogpt, track 3, entries #39 and #46 (`results/20260619_cwd_rowfloor_tailema/
train_gpt_cwd_SOTA.py` lines 556-653 and 828-836).

Readings chosen:
- The inner step starts from the lookahead point: gradient, decay and step are all taken there, and
  the lookahead is never taken back. W_{t+1} - W_t therefore holds beta_t m_t too.
- An inner step of rate 0 still moves, by beta_t m_t.
- The inner optimizer sees no other change: its moments are those of the gradients at these points.
- `lookahead_rates` are the code's: beta_t = beta s, where s is the rate relative to its maximum
  that was set for the step before (at t = 0: 1), because the code looks ahead before it sets the
  rate; and 0 unless prefill <= t < rest. In #46 the rate is the token embedding's, beta = 0.3,
  gamma = 0.99, prefill = 300, rest = 2900 - 950; #39 has beta = 0.6, prefill 500, rest 2400.
"""

import numpy as np


def lookahead_rates(shares, *, beta=0.3, prefill=300, rest=1950):
    """beta_t of every step, from the rates relative to their maximum, one per step."""
    before = np.concatenate([[1.0], np.float64(shares)[:-1]])
    t = np.arange(len(shares))
    return np.where((t >= prefill) & (t < rest), beta * before, 0.0)


def ema_nesterov(W, step, *, betas, gamma=0.99):
    """Run `step`, (point, t) -> weights, from t = 0 on, one beta_t per step.

    Returns the weights after each step, and the states: `point`, where the step started, and m.
    """
    m = np.zeros_like(W)
    weights, states = [], []
    for t, beta in enumerate(betas):
        point = W + beta * m
        moved = step(point, t)
        m = gamma * m + (1 - gamma) * (moved - W)
        W = moved
        weights.append(W)
        states.append({"point": point, "m": m})
    return weights, states
