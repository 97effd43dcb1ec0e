r"""Refresh by norm: a new subspace when the old one captures little of the gradient.

A check replaces the basis $U$ of the last refresh if $\|U^\top G\|_F \le \varsigma$ (Refael et al.,
SUMO, arXiv:2505.24749, Algorithm 1, the criterion in place of a period). Cost of a check: the
projection, `2mnr` FLOPs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._validate import check_interval, check_positive_int
from ._policy import Every, ProjectionCheck, RefreshPolicy, Verdict


@dataclasses.dataclass(frozen=True)
class BelowNorm(RefreshPolicy):
    """The policy that `below_norm` returns."""

    schedule: Every
    threshold: Any

    examines = "projection"

    def examine(self, check: ProjectionCheck) -> Verdict:
        """Compares the norm of the projected gradient with the threshold."""
        return Verdict(check.first | (check.norm <= self.threshold))


def below_norm(threshold: jax.typing.ArrayLike, *, check_every: int = 1) -> BelowNorm:
    """Refreshes a subspace when the norm of the projected gradient is at most `threshold`.

    Args:
      threshold: ς, a Frobenius norm.
      check_every: f, steps between checks, at steps 1, f + 1, 2f + 1, … The first check refreshes.

    Raises:
      ValueError: if an argument is outside its range; the message names it.
    """
    check_interval("threshold", threshold, 0.0)
    check_positive_int("check_every", check_every, traced=True)
    return BelowNorm(Every(check_every, offset=1), threshold)
