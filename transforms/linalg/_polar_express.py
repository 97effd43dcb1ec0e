r"""Coefficients for a number of Newton-Schulz iterations (Amsel et al., arXiv:2505.16932).

The iteration of `_polar.py` maps singular values by $p(\sigma) = a\sigma + b\sigma^3 + c\sigma^5$.
For singular values in $[l, u]$ the best row makes the largest distance of $p$ from 1 least over
$[\max(l, \delta u), u]$, and is scaled so that $p(l)$ and $p(u)$ are equally far from 1
(Algorithm 1). The next interval is $[p(l), 2 - p(l)]$; the first is $[l, 1]$. A safety factor $s$
replaces $p(x)$ by $p(x / s)$, against singular values that rounding leaves above $u$.
"""

from __future__ import annotations

import numpy as np

from .._validate import checked
from ._iterations import closest_quintic

POWERS = np.array([1, 3, 5])
CLOSE = 5e-6
"""An interval of this relative width counts as a point, where the best row is a limit."""


@checked
def polar_express(
    steps: int, *, lower: float = 1e-3, cushion: float = 0.02, safety: float = 1.02
) -> tuple[tuple[float, float, float], ...]:
    r"""Rows `(a, b, c)` that are the best for this number of iterations together.

    Each maps singular values by :math:`a\sigma + b\sigma^3 + c\sigma^5`. The defaults are those of
    modded-nanogpt with `steps=5`, whose last row has no safety factor. The name "polar_express"
    stands for the paper's list, for more steps to come and with a safety factor of 1.01.

    Args:
      steps: number of iterations.
      lower: l, the smallest singular value of a matrix of norm 1 that is to become 1.
      cushion: δ: smaller singular values than this part of the largest wait for later steps.
      safety: s, at least 1.

    Returns:
      A row for each iteration.

    Example:
      >>> import curvax
      >>> express = curvax.polar.newton_schulz(4, coefficients=curvax.polar_express(4))
      >>> optimizer = curvax.muon(0.02, method=express)

    References:
      Amsel et al., `The Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025, Algorithm 1.
    """
    rows, low, high = [], lower, 1.0
    for step in range(steps):
        start = max(low, cushion * high)
        if start > (1 - CLOSE) * high:
            row = np.array([15, -10, 3]) / 8 / high**POWERS
        else:
            row = np.array(closest_quintic(start, high)[0])
        row = row * 2 / (row @ low**POWERS + row @ high**POWERS)
        safe = row / safety**POWERS
        rows.append(tuple(map(float, safe if step < steps - 1 else row)))
        low = float(safe @ low**POWERS)
        high = 2 - low
    return tuple(rows)
