"""Coefficients of Polar Express by number of steps, and DeepSeek-V4's, in NumPy float64.

Paper: "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon Algorithm"
(arXiv:2505.16932), Algorithm 1 and its listings. The polynomial p(x) = a x + b x^3 + c x^5 that is
closest to 1 on [l, u] equioscillates: p(l) = p(r) = 1 - E, p(q) = p(u) = 1 + E, with q < r the
extrema of p. A step takes it for [max(l, cushion u), u], rescaled so that p(l) and p(u) are at the
same distance from 1; the next interval is [p(l), 2 - p(l)], the first [l, 1]. Where l / u is at
least 1 - 5e-6, p has its limit (15, -10, 3) / 8 of x / u.
A safety factor s: (a / s, b / s^3, c / s^5), against singular values above 1 by rounding.

Two tables follow from this, which differ in how s enters and so in what "n steps" means:
- `polar_express_table` is the paper's listing: l = 1e-3, cushion 0.02407327424182761, composed
  without s; then s = 1.01 on all polynomials but the eighth, (1.875, -1.25, 0.375), which is
  repeated for more steps. Fewer steps take the first ones. (Rounded to four digits in
  NVIDIA-NeMo/Emerging-Optimizers, `orthogonalized_optimizers/muon_utils.py` lines 45-57.)
- `polar_express_for`, made for n steps: s enters the composition, and the last of the n has none
  (modded-nanogpt, `train_gpt.py` lines 167-174: n = 5, s = 1.02, cushion 0.02).

DeepSeek-V4 (same file of Emerging-Optimizers, lines 75-77, from its report): eight iterations of
Muon's (3.4445, -4.7750, 2.0315), then two of (2, -1.5, 0.5); more repeat the last one (line 239).

Readings chosen:
- The start of `polar_express`: X / (s ||X||_F + eps) with eps = 1e-7 (the paper's listing; the
  code of modded-nanogpt has 1e-6).
- The extrema of p are found by the fixed-point iteration of the paper's listing.
- The seventh polynomial is known to about 1e-9 only: it comes from an interval whose width
  cancels.
"""

import numpy as np

from .muon import COEFFICIENTS, newton_schulz_from

PAPERS_CUSHION = 0.02407327424182761
DEEPSEEK_V4 = (COEFFICIENTS,) * 8 + ((2.0, -1.5, 0.5),) * 2


def optimal_quintic(l, u):
    """The closest p to 1 on [l, u]."""
    if l / u >= 1 - 5e-6:
        return 15 / 8 / u, -10 / 8 / u**3, 3 / 8 / u**5
    q, r, error, before = (3 * l + u) / 4, (l + 3 * u) / 4, np.inf, None
    a = b = c = 0.0
    while before is None or abs(error - before) > 1e-15:
        before = error
        points = np.array([l, q, r, u])
        signs = [1, -1, 1, -1]
        system = np.stack([points, points**3, points**5, signs], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        # p' = a + 3 b x^2 + 5 c x^4
        root = np.sqrt(9 * b**2 - 20 * a * c)
        q, r = np.sqrt((-3 * b - root) / (10 * c)), np.sqrt((-3 * b + root) / (10 * c))
    return a, b, c


def safe(triple, factor):
    """p(x / factor)."""
    return tuple(x / factor**power for x, power in zip(triple, (1, 3, 5), strict=True))


def composition(steps, lower=1e-3, cushion=PAPERS_CUSHION, safety=1.0):
    """The polynomials of `steps` steps, with the safety factor in all of them."""
    l, u, triples = lower, 1.0, []
    for _ in range(steps):
        triple = np.array(optimal_quintic(max(l, cushion * u), u))
        at_l, at_u = triple @ [l, l**3, l**5], triple @ [u, u**3, u**5]
        triple = safe(triple * 2 / (at_l + at_u), safety)
        triples.append(tuple(float(x) for x in triple))
        l = float(np.dot(triple, [l, l**3, l**5]))
        u = 2 - l
    return triples


def polar_express_table(steps, safety=1.01):
    """The paper's list for `steps` steps."""
    triples = [safe(x, safety) for x in composition(7)] + [(1.875, -1.25, 0.375)]
    return [*triples, *[triples[-1]] * (steps - 8)][:steps]


def polar_express_for(steps, *, lower=1e-3, cushion=0.02, safety=1.02):
    """The polynomials made for `steps` steps, the last without safety factor."""
    *triples, last = composition(steps, lower, cushion, safety)
    return [*triples, safe(last, 1 / safety)]


def deepseek_v4(steps=10):
    """DeepSeek-V4's for `steps` steps."""
    return [*DEEPSEEK_V4, *[DEEPSEEK_V4[-1]] * (steps - 10)][:steps]


def polar_express(X, triples, *, safety=1.01, eps=1e-7):
    """The iteration with these polynomials from X / (safety ||X||_F + eps)."""
    return newton_schulz_from(X / (safety * np.sqrt(np.sum(X**2)) + eps), triples)
