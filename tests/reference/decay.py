"""Decoupled weight decay, plain or cautious, by four rules for its rate, in NumPy float64.

W <- W - eta_t u - r_t lambda (mask *) W, entry by entry, all with the W from before the step. With
s_t = eta_t / max_t eta_t, the shape of the schedule:

- by="rate":       r_t = eta_t, as in AdamW, and in "Cautious Weight Decay" (arXiv:2510.12402,
                   Algorithm 1) with the mask 1(u W >= 0);
- by="schedule":   r_t = s_t: independent of the base rate, but on its schedule ("Decoupled Weight
                   Decay Regularization", arXiv:1711.05101, Algorithm 2: eta_t (alpha u + lambda W);
                   independent decay of "Small-scale proxies ...", arXiv:2309.14322);
- by="step":       r_t = 1: independent of base rate and schedule;
- by="corrected":  r_t = eta_t s_t: AdamC ("Why Gradients Rapidly Increase Near the End of
                   Training", arXiv:2506.02285), and MuonC; marin-community/marin,
                   `lib/levanter/src/levanter/optim/cautious.py`, option adamc_weight_decay.

Readings chosen:
- "Independent" leaves open which of "schedule" and "step" is meant; both are here. In the transfer
  over width (arXiv:2512.05620) lambda is proportional to 1 / width, by "schedule".
- The maximum of the rates is that of the rates that are given, all steps of the run.
- mask: "at_least_zero" is Algorithm 1's u W >= 0; "positive" is u W > 0, as in entry #46 of
  modded-nanogpt's track 3 (`train_gpt_cwd_SOTA.py` line 509). The weights differ only where u = 0.
"""

import numpy as np

from .lengths import per_step


def decay_rates(learning_rates, by):
    """r_t of every step."""
    shape = learning_rates / np.max(learning_rates)
    return {
        "rate": learning_rates,
        "schedule": shape,
        "step": np.ones_like(learning_rates),
        "corrected": learning_rates * shape,
    }[by]


def decay_mask(u, W, cautious):
    """Which entries decay, for cautious = None, "at_least_zero" or "positive"."""
    if cautious is None:
        return np.ones(W.shape, bool)
    return {"at_least_zero": u * W >= 0, "positive": u * W > 0}[cautious]


def decay(updates, W, *, learning_rates, weight_decay, by="rate", cautious=None):
    """Run it over the updates. Returns the weights after each step."""
    rates = per_step(learning_rates, len(updates))
    weights = []
    for u, eta, r in zip(updates, rates, decay_rates(rates, by), strict=True):
        W = W - eta * u - r * weight_decay * decay_mask(u, W, cautious) * W
        weights.append(W)
    return weights
