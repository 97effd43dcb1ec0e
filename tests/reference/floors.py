"""The floor for the length of an update ("u/w-floor"), transcribed in NumPy float64.

Source: modded-nanogpt, track 3. Entry #9 (`results/20260501_skylight001/f78af80a-....txt` lines
241-248): u <- u max(1, c ||W||_F / ||u||_F) with c = 0.35. Entry #46
(`results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py` lines 488-503): the same by rows, one
row per output, with c = 0.3825; and by matrix with `ROWFLOOR = False`.

Readings chosen:
- The rate multiplies the floored update: the step is at least c eta ||W|| long.
- Both norms are clamped at 1e-8 from below, as in the sources. So u = 0 (or a row of zeros) stays
  0, and zero weights have no floor (an update below c 1e-8 has one, of that length).
- unit="row" is the source's, for weights outputs by inputs; "column" is for kernels stored inputs
  by outputs.
- The source's exponent ROWFLOOR_RHO is 1 and left out.
"""

import numpy as np

from .lengths import per_step

AXES = {"matrix": None, "row": 1, "column": 0}


def floored(u, W, share=0.3825, unit="row", eps=1e-8):
    """u, nowhere shorter than `share` of the weights' length."""
    axis = AXES[unit]
    length = np.maximum(np.sqrt(np.sum(u**2, axis=axis, keepdims=True)), eps)
    wanted = share * np.maximum(np.sqrt(np.sum(W**2, axis=axis, keepdims=True)), eps)
    return u * np.maximum(wanted / length, 1.0)


def floor(updates, W, *, learning_rates, share=0.3825, unit="row"):
    """Run W <- W - eta floored(u, W) over the updates. Returns the weights after each step."""
    weights = []
    for u, rate in zip(updates, per_step(learning_rates, len(updates)), strict=True):
        W = W - rate * floored(u, W, share, unit)
        weights.append(W)
    return weights
