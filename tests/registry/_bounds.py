"""Upper bounds on the norm of a direction: the input of a row's bound, and shared inequalities."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Step(NamedTuple):
    """A step at which the Frobenius norm of a direction is bounded."""

    m: int
    n: int
    t: int  # counted from 1
    longest: float  # largest Frobenius norm of a gradient so far
    gradient: np.ndarray  # the gradient of this step


def polar(at: Step) -> float:
    """The norm of a polar factor: the root of its rank."""
    return math.sqrt(min(at.m, at.n))


def of_moments(b1: float, b2: float, t: int, corrected: bool = False) -> float:
    """The largest `|M| / √v` at step `t` for averages with these decay rates.

    By the Cauchy-Schwarz inequality `|M| ≤ (1 - b1) √(Σ (b1²/b2)^k / (1 - b2)) √v`, where `v`
    averages `G²` or the squared norm of `G`.
    """
    ratio = (1 - b1) * math.sqrt(sum((b1**2 / b2) ** k for k in range(t)) / (1 - b2))
    return ratio * (math.sqrt(1 - b2**t) / (1 - b1**t) if corrected else 1)


def adam(at: Step, b1: float = 0.9, b2: float = 0.999) -> float:
    """A bound for Adam's direction, in which every entry is a ratio of moments."""
    return of_moments(b1, b2, at.t, corrected=True) * math.sqrt(at.m * at.n)


def projected(at: Step) -> float:
    """The Frobenius norm of a projected matrix of ones, at rank 3 on the smaller side."""
    return math.sqrt(min(3, at.m, at.n) * max(at.m, at.n))


def in_eigenbasis(at: Step) -> float:
    """The limit of SOAP and Eigen-Adam in these rows: of moments with b1 = 0.9 and b2 = 0.95."""
    return of_moments(0.9, 0.95, 10_000) * math.sqrt(at.m * at.n)


def of_eigenvalues(at: Step) -> float:
    """The limit of KL-Shampoo in its row, with b1 = 0.9 and b2 = 0.95."""
    b1, b2 = 0.9, 0.95
    return (1 - b1) * math.sqrt(b2 / ((1 - b2) * (b2**2 - b1**2)) * at.m * at.n)


def assert_bounded(longest: Any, gradients: Sequence[np.ndarray], updates: np.ndarray) -> None:
    """Checks every update against its bound. Gradients whose squares overflow count as zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(np.square(np.stack(gradients)), axis=(-2, -1))  # float32 (t, BATCH)
        lengths = np.linalg.norm(np.stack(gradients).astype(np.float64), axis=(-2, -1))
    lengths = np.where(np.isfinite(squares), lengths, 0)
    found = np.linalg.norm(updates.astype(np.float64), axis=(-2, -1))
    for t, largest in enumerate(np.maximum.accumulate(lengths), start=1):
        for length, g, x in zip(found[t - 1], largest, gradients[t - 1], strict=True):
            bound = longest(Step(x.shape[-2], x.shape[-1], t, float(g), x))
            assert length <= 1.001 * bound, f"step {t}: length {length:.3g}, bound {bound:.3g}"
