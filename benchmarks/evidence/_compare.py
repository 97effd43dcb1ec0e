"""The results of a suite: differences to AdamW by seed, and speed-ups on AdamW's own curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ._plan import Request, Runs, loss_of, tuning_of
from ._suites import SUITES, Suite

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """The difference of paired losses; negative is better."""

    mean: float
    low: float  # ends of the confidence interval
    high: float
    p: float  # of a paired t-test, two-sided

    @property
    def word(self) -> str:
        """`below`, `above`, or `as AdamW` where the interval has 0 in it."""
        return "below" if self.high < 0 else "above" if self.low > 0 else "as AdamW"


def difference(losses: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of two methods with the same seeds; infinite if one of the first diverged."""
    d = np.subtract(losses, others)
    if not np.isfinite(d).all():
        return Difference(math.inf, math.inf, math.inf, math.nan)
    mean, error = float(d.mean()), float(d.std(ddof=1) / len(d) ** 0.5)
    if error == 0:
        return Difference(mean, mean, mean, 0.0 if mean else 1.0)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(d) - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, len(d) - 1))
    return Difference(mean, mean - half, mean + half, p)


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """p-values after Holm's correction for as many comparisons; NaN stays."""
    known = sorted((p, name) for name, p in ps.items() if not math.isnan(p))
    found, largest = dict(ps), 0.0
    for i, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - i) * p))
        found[name] = largest
    return found


def steps_for(loss: float, curve: Mapping[int, float]) -> tuple[float, str]:
    """Steps after which AdamW, tuned for that length, ends at a loss.

    Args:
      loss: of another method.
      curve: AdamW's final losses by length.

    Returns:
      The steps, on a line in log steps between two lengths; and `""`, `"<"` if the shortest length
      is enough, or `">"` if the longest is not.
    """
    lengths = sorted(curve)
    if loss >= curve[lengths[0]]:
        return float(lengths[0]), "<" if loss > curve[lengths[0]] else ""
    for short, long in itertools.pairwise(lengths):
        if curve[long] <= loss:
            share = (curve[short] - loss) / (curve[short] - curve[long])
            return math.exp(math.log(short) + share * math.log(long / short)), ""
    return float(lengths[-1]), ">"


def speed_up(loss: float, steps: int, curve: Mapping[int, float], slower: float = 1.0) -> str:
    """AdamW's steps to a loss over the method's own; a bound outside AdamW's lengths.

    Args:
      loss: of the method.
      steps: its own.
      curve: AdamW's final losses by length.
      slower: the time of its step over that of AdamW's, for a speed-up in time.
    """
    if not curve or not math.isfinite(loss):
        return ""
    needed, sign = steps_for(loss, curve)
    return f"{sign + ' ' if sign else ''}{needed / steps / slower:.2f}"


class Result(NamedTuple):
    """A method in a suite, as far as it has come."""

    tuning: Any  # a `Tuning`, or None
    finals: list[Mapping[str, Any]]  # lines of the seeds, in their order

    @property
    def losses(self) -> list[float]:
        """By seed."""
        return [loss_of(line) for line in self.finals]

    @property
    def seconds(self) -> np.ndarray:
        """Processor time of stretches, `(seeds, stretches)`, as on the machine of the others."""
        return np.array([np.multiply(x["cpu_seconds"], x.get("clock", 1)) for x in self.finals])

    @property
    def milliseconds(self) -> float:
        """Processor time of a step, the median of the seeds."""
        return 1e3 * float(np.median(self.seconds.sum(1))) / self.finals[0]["steps"][-1]


def results(suite: Suite, runs: Runs) -> dict[str, Result]:
    """By method; the seeds are there once the tuning has ended."""
    found = {}
    for method in suite.methods:
        tuning = tuning_of(suite, method, runs)
        finals = []
        if tuning is not None and tuning.best is not None:
            keys = [Request(suite.name, method, tuning.best, seed).key for seed in suite.seeds]
            finals = [runs[key] for key in keys if key in runs]
        found[method] = Result(tuning, finals)
    return found


def curve_of(suite: Suite, runs: Runs) -> dict[int, float]:
    """AdamW's mean final loss by length, over the suites of this suite's ladder that have ended.

    Empty for a suite that is of one length alone.
    """
    found: dict[int, float] = {}
    if suite.ladder is None:
        return found
    for other in SUITES.values():
        if other.ladder != suite.ladder or "adamw" not in other.methods:
            continue
        adamw = results(other, runs)["adamw"]
        if len(adamw.finals) == len(other.seeds):
            found[other.steps] = float(np.mean(adamw.losses))
    return found
