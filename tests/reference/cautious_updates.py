"""Cautious updates, transcribed in NumPy float64.

Paper: "Cautious Optimizers: Improving Training with One Line of Code" (arXiv:2411.16085),
Algorithm 1: phi = 1(u g > 0), u <- alpha phi u with alpha = d / (nnz(phi) + 1), entry by entry, for
an update u (W <- W - eta u) and the gradient g of the step; d is the number of entries.

Readings chosen:
- scale="count" is the paper's; "mean" is alpha = 1 / (mean(phi) + eps) (marin-community/marin,
  `lib/levanter/src/levanter/optim/cautious.py`, eps = 1e-8); None is alpha = 1.
- A product of 0 is masked (HomebrewML/HeavyBall, `heavyball/utils.py` lines 3653-3658, compares
  sign bits instead, and has alpha = d / max(nnz, 1)).
- d and nnz are those of one parameter, not of all; decay comes after, unmasked.
"""

import numpy as np


def cautious_update(u, gradient, *, scale="count", eps=1e-8):
    """The masked update."""
    mask = u * gradient > 0
    alpha = {
        "count": mask.size / (np.sum(mask) + 1),
        "mean": 1 / (np.mean(mask) + eps),
        None: 1.0,
    }[scale]
    return alpha * mask * u


def cautious_updates(updates, gradients, **options):
    """The masked updates of all steps; options as in `cautious_update`."""
    return [cautious_update(u, g, **options) for u, g in zip(updates, gradients, strict=True)]
