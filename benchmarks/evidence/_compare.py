"""The results of a suite: differences to AdamW by seed, speed-ups on AdamW's curve, verdicts.

A claim of a paper (`claims.toml`) is compared seed by seed: it holds against another method if the
difference is on its side and its p-value, by Holm's correction for all comparisons of the paper's
table, is below 0.05. Differences of up to 0.01 count as level, whatever the interval.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ._plan import Request, Runs, loss_of, tuning_of
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


def corrected(claims: Iterable[Claim], runs: Runs) -> dict[str, float]:
    """p-values of all comparisons of claims, after Holm's correction."""
    ps = {}
    for claim in claims:
        for suite in claim.suites if claim.steps is None else ():
            found = results(SUITES[suite], runs)
            for other in claim.others:
                pair = [found[name].finals for name in (claim.method, other)]
                if all(len(finals) == len(SUITES[suite].seeds) for finals in pair):
                    d = difference(found[claim.method].losses, found[other].losses)
                    ps[key_of(suite, claim.method, other)] = d.p
    return holm(ps)


def words_of(
    claim: Claim, suite: str, found: Mapping[str, Result], ps: Mapping[str, float]
) -> Iterator[tuple[str, str, bool | None]]:
    """Each other method, the difference to it, and whether the claim holds; `None`: undecided."""
    own = found[claim.method].losses
    for other in claim.others:
        d = difference(own, found[other].losses)
        p = ps[key_of(suite, claim.method, other)]
        told = f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] to {name_of(other)}, p {p:.1g}"
        decided = not p > 1 - CONFIDENCE  # NaN: one of the runs diverged
        if claim.level:
            holds: bool | None = not decided or abs(d.mean) <= LEVEL
        else:
            holds = (d.mean < 0) != claim.behind if decided else None
        yield name_of(other), told, holds


def judged(claim: Claim, suite: str, runs: Runs, ps: Mapping[str, float]) -> tuple[str, str]:
    """The measurement, and the verdict."""
    found = results(SUITES[suite], runs)
    needed = (claim.method, *claim.others)
    seeds = SUITES[suite].seeds
    if any(len(found[name].finals) < len(seeds) for name in needed):
        return "", "open: not all runs are there"
    own = float(np.mean(found[claim.method].losses))
    if claim.steps is not None:
        steps, sign = steps_for(own, curve_of(SUITES[suite], runs))
        ratio = steps / SUITES[suite].steps
        agrees = ratio >= claim.steps
        if sign == ">" and not agrees:
            return f"more than {ratio:.2f} times", "open: longer runs of AdamW are missing"
        measured = f"{'more than ' if sign == '>' else ''}{ratio:.2f} times"
        return measured, "agrees" if agrees else "disagrees"
    words = list(words_of(claim, suite, found, ps))
    measured = "; ".join(told for _, told, _ in words)
    verdicts = {holds for _, _, holds in words}
    if verdicts == {True}:
        return measured, "agrees"
    if verdicts == {None}:
        return measured, "undecided: within the noise of seeds"
    kinds = {True: "agrees against", False: "disagrees against", None: "undecided against"}
    if verdicts == {False}:
        return measured, "disagrees"
    parts = [
        f"{kind} {', '.join(other for other, _, holds in words if holds is key)}"
        for key, kind in kinds.items()
        if key in verdicts
    ]
    return measured, "; ".join(parts)
