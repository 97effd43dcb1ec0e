"""Two radial brakes, transcribed in NumPy float64.

NVIDIA's (NVIDIA-NeMo/Emerging-Optimizers, `emerging_optimizers/weight_update_hooks/radial_brake.py`
lines 26-33 and 61-89) acts on the norm after the step V = W - eta u:
    W_new = V (||W|| + s (||V|| - ||W||)) / ||V||, s = outward if ||V|| > ||W||, else inward.
It also brakes the growth that a tangential step causes, which is of second order.

The one of entry #29 of modded-nanogpt's track 3
(`results/20260511_dampen_radial_gradient_component/`, the log 00882c75-..., lines 450-477 and
649-660) acts on the update, then pins the norm. With c = <u, W> / ||W||^2:
    u <- u - c W + s c W, s = outward if c < 0 (the step is -eta u), else inward;
    [u <- floored, `reference.floors`];
    r = ||W|| - eta <u, W> / ||W||;
    W_new = (W - eta u) r / ||W - eta u||.
The pin removes what a tangential step adds to the norm; the norm moves by the braked radial part.

Readings chosen:
- outward = inward = 1 does not brake in NVIDIA's form. In #29's the pin is left.
- outward = 0 = inward keeps the norm, for both.
- NVIDIA's eps = 1e-15: norms and changes of the norm below it count as 0. Where the norm does not
  change, the result has the norm of W. Zero weights leave zero, with the length outward ||eta u||.
- #29's clamps: ||W||^2 at 1e-12 in c, ||W||, r and the norm after the step at 1e-8. Zero weights
  leave zero by these clamps alone: they are pinned to the norm 1e-8 first; then the norm grows by
  outward eta ||u|| and so on while u keeps pointing outward.
- The floor is an argument (u, W) -> u, between brake and pin, as in the source.
"""

import numpy as np

from .lengths import frobenius, per_step


def nvidia_brake_step(W, V, outward=0.5, inward=1.0, eps=1e-15):
    """The weights after the step from W to V."""
    before, after = (n if n >= eps else 0.0 for n in (frobenius(W), frobenius(V)))
    change = after - before
    s = outward if change >= eps else inward if change <= -eps else 0.0
    return V * ((before + s * change) / after) if after > 0 else np.zeros_like(V)


def nvidia_brake(updates, W, *, learning_rates, outward=0.5, inward=1.0):
    """Run it over the updates. Returns the weights after each step."""
    weights = []
    for u, rate in zip(updates, per_step(learning_rates, len(updates)), strict=True):
        W = nvidia_brake_step(W, W - rate * u, outward, inward)
        weights.append(W)
    return weights


def brake_update(u, W, outward=0.5, inward=1.0, eps=1e-12):
    """The update whose radial part is multiplied by `outward` where the step -u leads outward."""
    c = np.sum(u * W) / max(np.sum(W**2), eps)
    s = outward if c < 0 else inward
    return u - c * W + s * c * W


def pinned_step(W, u, rate, eps=1e-8):
    """W - rate u, at the norm to which the radial part of u leads in first order."""
    before = max(frobenius(W), eps)
    radius = max(before - rate * np.sum(u * W) / before, eps)
    moved = W - rate * u
    return moved * (radius / max(frobenius(moved), eps))


def record_brake(updates, W, *, learning_rates, outward=0.5, inward=1.0, floor=lambda u, W: u):
    """Run the brake of #29 over the updates. Returns the weights after each step."""
    weights = []
    for u, rate in zip(updates, per_step(learning_rates, len(updates)), strict=True):
        W = pinned_step(W, floor(brake_update(u, W, outward, inward), W), rate)
        weights.append(W)
    return weights
