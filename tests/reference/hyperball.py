"""Hyperball with a schedule of rates and a radius of one's own, transcribed in NumPy float64.

Paper: "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization"
(arXiv:2606.16899): with R the norm of the initial weights,
W <- R Normalize(W - eta R Normalize(u)), Normalize(X) = X / ||X||_F. Code: marin-community/marin,
`lib/levanter/src/levanter/optim/muonh.py` (docstring of MuonHConfig; scale_invariant_update);
KellerJordan/modded-nanogpt, track 3, `results/20260430_muonh/train_gpt_simple_muonh.py` lines
197-206; NVIDIA-NeMo/Emerging-Optimizers, `weight_update_hooks/hyperball.py` lines 42-63.
`reference.cautious.hyperball` is the same with one rate.

Readings chosen:
- R is measured once, before the first step. Marin and modded-nanogpt measure ||W|| at every step,
  which is R up to rounding.
- The scale of u is lost: any positive multiple of u gives the same step.
- No eps (the sources: 1e-10, and 1e-15 in Emerging). u = 0 gives no step; a sum that is 0, which
  has no direction, keeps W.
- Zero weights: with their own R = 0 they stay 0, by the formula. `radius` is Emerging's argument, a
  radius that the user names; weights that start at 0 are on its sphere after one step, at
  -radius Normalize(u). Emerging requires that other weights start on the sphere; here the first
  step takes them there.
"""

from .lengths import frobenius, per_step


def hyperball_step(W, u, rate, radius):
    """One step from W, with the result on the sphere."""
    length = frobenius(u)
    if length == 0:
        return W
    moved = W - rate * radius * u / length
    norm = frobenius(moved)
    return radius * moved / norm if norm > 0 else W


def hyperball(updates, W, *, learning_rates, radius=None):
    """Run it over the updates. Returns the weights after each step.

    `learning_rates` is a number or one per step; `radius` None is the norm of W.
    """
    radius = frobenius(W) if radius is None else radius
    weights = []
    for u, rate in zip(updates, per_step(learning_rates, len(updates)), strict=True):
        W = hyperball_step(W, u, rate, radius)
        weights.append(W)
    return weights
