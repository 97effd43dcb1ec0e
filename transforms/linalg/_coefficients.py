r"""Coefficients of Newton-Schulz iterations: published ones, and the best ones for an interval.

Each row $(a, b, c)$ maps singular values by $p(\sigma) = a\sigma + b\sigma^3 + c\sigma^5$. For
singular values in $[l, u]$ the best row makes the largest distance of $p$ from 1 least over
$[\max(l, \delta u), u]$, and is scaled so that $p(l)$ and $p(u)$ are equally far from 1 (Amsel et
al., The Polar Express, arXiv:2505.16932, Algorithm 1). The next interval is $[p(l), 2 - p(l)]$; the
first is $[l, 1]$. A safety factor $s$ replaces $p(x)$ by $p(x / s)$, against rounding above $u$.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._validate import checked

Row = tuple[float, float, float]
Rows = tuple[Row, ...]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

POWERS = np.array([1, 3, 5])
CLOSE = 5e-6
"""An interval of this relative width counts as a point, where the best row is a limit."""

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # Algorithm 1 of the paper: guards all rows but the last against σ just above 1

NEWTON_SCHULZ_COEFFICIENTS: dict[str, Rows] = {
    # Jordan et al., Muon (2024): largest slope at 0; singular values end up in about [0.7, 1.2].
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # An et al., ASGO, section C.3: converges to 1, slowly from small singular values.
    "classical": ((2.0, -1.5, 0.5),),
    # Amsel et al., "The Polar Express", arXiv:2505.16932, Algorithm 1: optimal for singular values
    # in [1e-3, 1]; the last row repeats.
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
    # Boissin et al., Turbo-Muon, arXiv:2512.04632, official code, for a start by "aol": the last
    # four of Jiacheng You's five. They bring singular values from 0.02 on to [0.97, 1.15].
    "turbo_muon": (
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # DeepSeek-V4's report, as in NVIDIA's Emerging-Optimizers, for 10 steps: Muon's eight times,
    # and "classical", which converges, for the last two.
    "deepseek_v4": (*[(3.4445, -4.7750, 2.0315)] * 8, (2.0, -1.5, 0.5)),
}
"""Published coefficients (a, b, c), one row per iteration; the last row repeats."""


@checked
def coefficient_rows(coefficients: Coefficients, steps: int) -> Rows:
    """One row (a, b, c) per iteration; fewer rows than `steps` repeat the last one."""
    is_name = isinstance(coefficients, str)
    rows: Any = NEWTON_SCHULZ_COEFFICIENTS.get(coefficients) if is_name else coefficients
    if not isinstance(rows, Sequence):
        raise ValueError(
            f"coefficients must be one of {', '.join(map(repr, NEWTON_SCHULZ_COEFFICIENTS))}, "
            f"three numbers or rows of three; got {coefficients!r}."
        )
    if not all(isinstance(row, Sequence) for row in rows):
        rows = (rows,)
    rows = [tuple(map(float, row)) for row in rows]
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(
            f"coefficients must be three numbers or rows of three, got {coefficients!r}."
        )
    return tuple(rows[min(i, len(rows) - 1)] for i in range(steps))


@checked
def polar_express(
    steps: int, *, lower: float = 1e-3, cushion: float = 0.02, safety: float = 1.02
) -> Rows:
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

    Raises:
      ValueError: if an argument is not in its range.

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


@functools.cache
def square_root_rows(condition: float, tolerance: float) -> np.ndarray:
    """Coefficients `(a, b, c)` for eigenvalues of 1 / condition to 1, `(rounds, 3)`.

    The largest distance of `t (a + b t² + c t⁴)` from 1 is least, by Remez' algorithm, until it is
    below 1e-3; then `(15 - 10 t² + 3 t⁴) / 8`, which cubes it, until it is below the tolerance.
    """
    rows, low, high, error = [], condition**-0.5, 1.0, 1.0
    while error > 1e-3:
        row, error = closest_quintic(low, high)
        rows.append(row)
        low, high = 1 - error, 1 + error
    while error > tolerance:
        rows.append(np.array([15, -10, 3]) / 8)
        error = 2.5 * error**3
    return np.array(rows)


def closest_quintic(low: float, high: float) -> tuple[list[float], float]:
    """`(a, b, c)` that bring `t (a + b t² + c t⁴)` closest to 1 on an interval; the distance."""
    points, row, error = low + (high - low) * np.array([0.0, 0.25, 0.75, 1.0]), [], 0.0
    for _ in range(30):  # it converges quadratically
        system = np.column_stack([points, points**3, points**5, [1, -1, 1, -1]])
        *row, error = np.linalg.solve(system, np.ones(4))
        points[1:3] = np.sort(np.sqrt(np.roots([5 * row[2], 3 * row[1], row[0]])))
    return row, error
