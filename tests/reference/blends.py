"""Sums of two directions at the length of the first, and the trust gate, in NumPy float64.

Source: modded-nanogpt, track 3, entry #46
(`results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py`; from entry #16):
- lines 348-352, norm-preserving blend: B = A + g (S - A), then B ||A|| / ||B||;
- lines 262-265: that norm is (sum sigma^4)^(1/4), the Schatten 4-norm, not Frobenius';
- lines 317-346, trust gate: with cos the cosine of two arrays, a = cos(S, A), agreement
  clip((a - 0.2) / 0.8, 0, 1), alignment clip(cos(S, G) / max(cos(A, G), eps), 0, 1), g their
  product; clipped from below by 0.45 until step 1375, linearly to 0 at step 1625, and from above by
  0.85 before step 1625. Only the attention's output matrices have it; the others have g = 1.

Readings chosen:
- length="first" is that of A in the norm `norm`: "schatten_4" (the source's) or "frobenius";
  length="sum" leaves the sum as it is.
- `weights` are those of A and S: 1 - g and g.
- eps = 1e-8: both norms, and the product of norms in a cosine, are at least eps, as in the source.
  So A = 0 gives a blend of the length 1e-8 at most, and not 0.
- step counts from 0.
"""

import numpy as np

from .lengths import frobenius, schatten_4


def blend(first, second, weights, *, length="first", norm="schatten_4", eps=1e-8):
    """The weighted sum of two directions, at its own length or that of `first`."""
    summed = weights[0] * first + weights[1] * second
    if length == "sum":
        return summed
    measure = {"schatten_4": schatten_4, "frobenius": frobenius}[norm]
    return summed * (max(measure(first), eps) / max(measure(summed), eps))


def cosine(A, B, eps=1e-8):
    """The cosine of two arrays; near 0 where one of them nearly is."""
    return np.sum(A * B) / max(frobenius(A) * frobenius(B), eps)


def trust_gate(first, second, gradient, *, min_agree=0.2, min_align=0.0, power=1.0, eps=1e-8):
    """How far `second` is trusted, from 0 to 1."""
    agree = (cosine(second, first, eps) - min_agree) / (1 - min_agree)
    align = (cosine(second, gradient, eps) - min_align) / max(
        cosine(first, gradient, eps) - min_align, eps
    )
    return (np.clip(agree, 0, 1) * np.clip(align, 0, 1)) ** power


def bounded_gate(gate, step, *, floor=0.45, cap=0.85, floor_end=1375, fade_end=1625):
    """The gate within its early bounds."""
    fade = (fade_end - step) / (fade_end - floor_end)
    lowest = floor * np.clip(fade, 0.0, 1.0)
    return np.clip(gate, lowest, cap if step < fade_end else 1.0)
