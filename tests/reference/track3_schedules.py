"""Schedules of modded-nanogpt's track 3, transcribed in NumPy float64.

Source: entry #46, `results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py`:
- lines 849-854, PowerCool: rate_t = min(rate, factor max(0, end - t)^power), end = 2900,
  power = 1.2;
- lines 856-872, momentum: from 0.85 to 0.95 in the first 300 steps, linearly; from 0.95 to 0.85 in
  the last 200 of all steps.
Entry #25, `results/20260511_klsoap_h_lr_power_decay/...py` lines 422-433: with
x = (1 - t / steps) / cooldown, rate_t = rate (floor + (1 - floor) x^power) where x < 1, else rate.

Readings chosen:
- t = 0, 1, ... A step that is in warmup and cooldown is in warmup, as in the source.
"""

import numpy as np

POWER_FACTORS = {  # lines 73-76
    "embedding": (0.3, 4.976805410800738e-05),
    "output": (1 / 320, 5.184172302917436e-07),
    "vectors": (0.01, 1.6589351369335795e-06),
    "matrices": (0.0375, 3.3169534699576625e-06),
}


def power_cool(t, rate, factor, *, end=2900, power=1.2):
    """The rate of step t."""
    return np.minimum(rate, factor * np.maximum(0.0, end - np.asarray(t)) ** power)


def cooldown(t, rate, *, steps, fraction=1.0, power=1.0, floor=0.0):
    """The rate of step t, flat before the last `fraction` of the steps."""
    x = np.minimum((1 - np.asarray(t) / steps) / fraction, 1.0)
    return rate * (floor + (1 - floor) * x**power)


def momentum_schedule(t, *, steps=2900, low=0.85, high=0.95, warmup=300, cooldown=200):
    """The momentum of step t."""
    t = np.asarray(t, np.float64)
    rising = low + t / max(warmup, 1) * (high - low)
    falling = high - (t - (steps - cooldown)) / max(cooldown, 1) * (high - low)
    return np.where(t < warmup, rising, np.where(t > steps - cooldown, falling, high))
