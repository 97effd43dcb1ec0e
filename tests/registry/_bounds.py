"""How long directions can be: what rows say about it, and the inequalities that they share."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """A step at which a direction's length is bounded."""

    m: int
    n: int
    t: int  # counted from 1
    longest: float  # Frobenius norm of the longest gradient so far
    gradient: np.ndarray  # that of this step


def polar(at: Step) -> float:
    """Of a polar factor: the root of its rank."""
    return math.sqrt(min(at.m, at.n))


def of_moments(b1: float, b2: float, t: int, corrected: bool = False) -> float:
    """The largest `|M| / √v` at step `t` of averages with these decay rates.

    By Cauchy and Schwarz `|M| ≤ (1 - b1) √(Σ (b1²/b2)^k / (1 - b2)) √v`, with `G²` or the squared
    norm of `G` in `v`.
    """
    ratio = (1 - b1) * math.sqrt(sum((b1**2 / b2) ** k for k in range(t)) / (1 - b2))
    return ratio * (math.sqrt(1 - b2**t) / (1 - b1**t) if corrected else 1)


def adam(at: Step, b1: float = 0.9, b2: float = 0.999) -> float:
    """Of Adam's direction: every entry is a ratio of moments."""
    return of_moments(b1, b2, at.t, corrected=True) * math.sqrt(at.m * at.n)


def projected(at: Step) -> float:
    """Frobenius norm of a projected matrix of ones, at rank 3 on the smaller side."""
    return math.sqrt(min(3, at.m, at.n) * max(at.m, at.n))


def in_eigenbasis(at: Step) -> float:
    """Of moments with b2 = 0.95 that turn with a basis.

    They may meet a second moment just above what counts as noise.
    """
    noise = max(at.m, at.n) * float(np.finfo(np.float32).eps)
    return at.m * at.n / (noise * math.sqrt(0.05 * 0.95**at.t))


KAPPA = 10.0
"""`‖column‖ ≤ KAPPA ‖its projection‖` for every column of the degenerate gradients.

Fira and Apollo scale columns by what becomes of their projections. Nothing bounds that in general.
"""
