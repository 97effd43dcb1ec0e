"""The next run, which follows from the lines alone.

Every suite tunes AdamW first, because the other methods give it all other parameters. Then all
others take turns, so that they have had equally many runs at any moment. When all budgets are
spent, every method runs with the seeds, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from .. import _record
from ._descent import Coordinate, Point, best_of, rounded, tried
from ._lines import IDENTITY, key_of
from ._methods import ADAM, METHODS
from ._suites import SUITES, TUNING_SEED, Suite

Runs = Mapping[str, Mapping[str, Any]]


class Request(NamedTuple):
    """A run."""

    suite: str
    method: str
    values: Point
    seed: int

    @property
    def key(self) -> str:
        """Its identity among the lines."""
        return key_of(dict(zip(IDENTITY, self, strict=True)))


class Tuning(NamedTuple):
    """The tuning of a method in a suite."""

    found: list[tuple[Point, float]]  # points and losses, in the order of the descent
    next: Point | None  # None if the budget is spent

    @property
    def best(self) -> Point | None:
        """The point at which the seeds run, once the budget is spent."""
        return best_of(self.found) if self.next is None else None


def loss_of(line: Mapping[str, Any]) -> float:
    """The loss of a run at its end: infinite where it diverged."""
    return math.inf if line["loss"] is None else line["loss"]


def start_of(suite: Suite, method: str, runs: Runs) -> Point | None:
    """Where the tuning of a method starts; `None` as long as another has to end before."""
    point = free_start_of(suite, method, runs)
    return point and point | {name: x for name, x in suite.fixed.items() if name in point}


def free_start_of(suite: Suite, method: str, runs: Runs) -> Point | None:
    """The same before what the suite holds fixed."""
    if method in ADAM and suite.after:
        return best_in(suite.after, method, runs)
    adamw = None if method in ADAM else best_in(suite.name, "adamw", runs)
    if method not in ADAM and adamw is None:
        return None
    if suite.after is None:
        start = METHODS[method].start(adamw)
        return start | {"rate": rounded(start["rate"] * suite.slower)}
    own = method if method in SUITES[suite.after].methods else METHODS[method].of
    there, point = (best_in(suite.after, name, runs) for name in ("adamw", own))
    if adamw is None or there is None or point is None:
        return None
    # The other parameters follow AdamW's rate for them from one suite to the next.
    ratio = others_rate(adamw) / others_rate(there)
    point = point | {"adam_rate": rounded(point["adam_rate"] * ratio)}
    return point | ({"rate": adamw["rate"]} if suite.carried else {})


def others_rate(adamw: Point) -> float:
    """AdamW's learning rate for parameters that are not matrices."""
    return adamw.get("adam_rate", adamw["rate"])


def best_in(suite: str, method: str, runs: Runs) -> Point | None:
    """The best point of a method, once its budget is spent."""
    tuning = tuning_of(SUITES[suite], method, runs)
    return tuning and tuning.best


def coordinates_of(suite: Suite, method: str) -> tuple[Coordinate, ...]:
    """The varied numbers."""
    return tuple(
        x
        for x in METHODS[method].coordinates
        if x.name not in suite.fixed and (suite.only is None or x.name in suite.only)
    )


def tuning_of(suite: Suite, method: str, runs: Runs) -> Tuning | None:
    """How far a method has come; `None` if it cannot start."""
    start = start_of(suite, method, runs)
    if start is None:
        return None

    def known(point: Point) -> float | None:
        line = runs.get(Request(suite.name, method, point, TUNING_SEED).key)
        return None if line is None else loss_of(line)

    coordinates = coordinates_of(suite, method)
    # With `everything` ASGO has no other parameters, and its descent goes on.
    last = 0 if "everything" in (x.name for x in coordinates) else suite.last
    return Tuning(*tried(coordinates, start, known, suite.budget, suite.scan, last))


def upcoming(suite: Suite, runs: Runs, begun: Container[str] = ()) -> Request | None:
    """The next run of a suite, or `None` if there is none left, or others have to end.

    Args:
      suite: the suite.
      runs: those that are there.
      begun: the identities of those that are running.
    """
    waiting: list[tuple[int, Request]] = []
    best: dict[str, Point] = {}
    for method in suite.methods:
        tuning = tuning_of(suite, method, runs)
        if tuning is None:
            continue
        if tuning.next is None:
            best[method] = best_of(tuning.found)
            continue
        request = Request(suite.name, method, tuning.next, TUNING_SEED)
        if request.key not in begun:
            waiting.append((len(tuning.found), request))
    if waiting:
        return min(waiting, key=lambda x: x[0])[1]
    if len(best) < len(suite.methods):
        return None
    for seed in suite.seeds:
        for method in suite.methods:
            request = Request(suite.name, method, best[method], seed)
            if request.key not in runs and request.key not in begun:
                return request
    return None


def count(suite: Suite, runs: Runs) -> int:
    """Runs of a suite that are there and that its plan asks for."""
    done = 0
    for method in suite.methods:
        tuning = tuning_of(suite, method, runs)
        if tuning is None:
            continue
        done += len(tuning.found)
        if tuning.best is not None:
            requests = (Request(suite.name, method, tuning.best, seed) for seed in suite.seeds)
            done += sum(request.key in runs for request in requests)
    return done


def status(suites: Iterable[Suite], runs: Runs) -> str:
    """The finished and the remaining work, in runs and in hours of one thread."""
    rows = []
    for suite in suites:
        there = count(suite, runs)
        took = [line["wall_seconds"] for line in runs.values() if line["suite"] == suite.name]
        each = sum(took) / len(took) if took else math.nan
        row = [suite.name, f"{there}", f"{suite.runs}"]
        row += [f"{each:.0f}", f"{each * (suite.runs - there) / 3600:.1f}"] if took else ["", ""]
        rows.append(row)
    return _record.table(["suite", "runs", "of", "seconds each", "hours left"], rows)
