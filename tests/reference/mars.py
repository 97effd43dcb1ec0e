"""MARS' corrected gradient, transcribed in NumPy float64.

Paper: "MARS: Unleashing the Power of Variance Reduction for Training Large Models"
(arXiv:2411.10438), its approximate form: c_t = g_t + gamma b1 / (1 - b1) (g_t - g_{t-1}), clipped:
c <- c / max(1, ||c||). Code: marin-community/marin, `lib/levanter/src/levanter/optim/mars.py`
(scale_by_mars: c goes into both moments of Adam; gamma = 0.025, b1 = 0.95, b2 = 0.99);
HomebrewML/HeavyBall, `heavyball/utils.py` lines 3616-3627, without the clip.

Readings chosen:
- `factor` = gamma b1 / (1 - b1), the short form g + f (g - g_prev), is the argument of
  `corrected_gradients`; `mars_factor` computes it.
- The gradient before the first: "zero" (Marin), so that c_1 = (1 + f) g_1; "same" (the paper's
  x_0 = x_1), so that c_1 = g_1.
- g_{t-1} is the gradient as it came, not the corrected or clipped one.
- clip: None, or the longest ||c||_F, of this array alone. The paper clips at 1; Marin clips the
  norm of all parameters together, with 1e-6 added to the norm.
"""

import numpy as np

from .lengths import frobenius


def mars_factor(gamma=0.025, b1=0.95):
    """The factor of the gradient's change."""
    return gamma * b1 / (1 - b1)


def corrected_gradients(gradients, *, factor, first="zero", clip=None):
    """c_t of all steps."""
    previous = np.zeros_like(gradients[0]) if first == "zero" else gradients[0]
    corrected = []
    for g in gradients:
        c = g + factor * (g - previous)
        if clip is not None:
            c = c / max(1.0, frobenius(c) / clip)
        corrected.append(c)
        previous = g
    return corrected
