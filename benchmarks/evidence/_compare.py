"""The results of a suite: differences to AdamW by seed, speed-ups on AdamW's curve, verdicts.

A claim of a paper (`claims.toml`) is compared seed by seed: it holds against another method if the
difference is on its side and its p-value, by Holm's correction for all comparisons of the paper's
table, is below 0.05. Differences of up to 0.01 count as level, whatever the interval.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ._plan import Runs, ended, results
from ._suites import SUITES, Suite

CONFIDENCE = 0.95
LEVEL = 0.01  # differences up to here count as level


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
    mean = float(d.mean())
    if np.ptp(d) == 0:
        return Difference(mean, mean, mean, 0.0 if mean else 1.0)
    found: Any = stats.ttest_1samp(d, 0.0)
    low, high = found.confidence_interval(CONFIDENCE)
    return Difference(mean, float(low), float(high), float(found.pvalue))


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


def curve_of(suite: Suite, runs: Runs) -> dict[int, float]:
    """AdamW's mean final loss by length, over the suites of this suite's ladder that have ended.

    Empty for a suite that is of one length alone.
    """
    if suite.ladder is None:
        return {}
    suites = [x for x in SUITES.values() if x.ladder == suite.ladder]
    found = {x.steps: ended(x, runs).get("adamw") for x in suites}
    return {steps: float(np.mean(x.losses)) for steps, x in found.items() if x is not None}


class Claim(NamedTuple):
    """That a method is ahead of others, or level with them; or needs a share of AdamW's steps."""

    claim: str
    suites: tuple[str, ...]
    method: str
    where: str = ""  # in the paper
    others: tuple[str, ...] = ("adamw",)
    level: bool = False
    steps: float | None = None  # how many times its steps AdamW needs, at least
    behind: bool = False  # that the method is behind the others


CLAIMS = {
    paper: [Claim(**claim) for claim in own]
    for paper, own in tomllib.loads(Path(__file__).with_name("claims.toml").read_text()).items()
}


def name_of(method: str) -> str:
    """As pages have it."""
    return "AdamW" if method in ("adamw", "optax.adamw") else f"`{method}`"


def key_of(suite: str, *methods: str) -> str:
    """Of a comparison, whichever of the two methods the claim names first."""
    return " ".join((suite, *sorted(methods)))


def differences(claim: Claim, suite: str, runs: Runs) -> dict[str, Difference]:
    """To the other methods, of those pairs that have all runs."""
    found = results(SUITES[suite], runs)
    there = {name for name, x in found.items() if len(x.finals) == len(SUITES[suite].seeds)}
    others = [other for other in claim.others if {claim.method, other} <= there]
    return {other: difference(found[claim.method].losses, found[other].losses) for other in others}


def corrected(claims: Iterable[Claim], runs: Runs) -> dict[str, float]:
    """p-values of all comparisons of claims, after Holm's correction."""
    pairs = [(claim, suite) for claim in claims if claim.steps is None for suite in claim.suites]
    return holm(
        {
            key_of(suite, claim.method, other): d.p
            for claim, suite in pairs
            for other, d in differences(claim, suite, runs).items()
        }
    )


def judged(claim: Claim, suite: str, runs: Runs, ps: Mapping[str, float]) -> tuple[str, str]:
    """The measurement, and the verdict."""
    found = differences(claim, suite, runs)
    if len(found) < len(claim.others):
        return "", "open: not all runs are there"
    if claim.steps is not None:
        own = float(np.mean(results(SUITES[suite], runs)[claim.method].losses))
        steps, sign = steps_for(own, curve_of(SUITES[suite], runs))
        ratio = steps / SUITES[suite].steps
        agrees = ratio >= claim.steps
        if sign == ">" and not agrees:
            return f"more than {ratio:.2f} times", "open: longer runs of AdamW are missing"
        measured = f"{'more than ' if sign == '>' else ''}{ratio:.2f} times"
        return measured, "agrees" if agrees else "disagrees"
    told: list[str] = []
    against: dict[str, list[str]] = {"agrees": [], "disagrees": [], "undecided": []}
    for other, d in found.items():
        p = ps[key_of(suite, claim.method, other)]
        told.append(f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] to {name_of(other)}, p {p:.1g}")
        decided = not p > 1 - CONFIDENCE  # NaN: one of the runs diverged
        verdict = "undecided"
        if claim.level:
            verdict = "disagrees" if decided and abs(d.mean) > LEVEL else "agrees"
        elif decided:
            verdict = "disagrees" if (d.mean < 0) == claim.behind else "agrees"
        against[verdict].append(name_of(other))
    verdicts = {verdict: ", ".join(names) for verdict, names in against.items() if names}
    if len(verdicts) > 1:
        verdict = "; ".join(f"{verdict} against {names}" for verdict, names in verdicts.items())
    elif against["undecided"]:
        verdict = "undecided: within the noise of seeds"
    return "; ".join(told), verdict
