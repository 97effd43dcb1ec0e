"""The next run, which follows from the lines alone.

Every suite tunes AdamW first, because the other methods give it all other parameters. Then all
others take turns, so that they have had equally many runs at any moment. When all budgets are
spent, every method runs with the seeds, seed by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _lines, _record
from ._descent import Coordinate, Point, best_of, rounded, tried
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
        """Its identity among the lines; a second line with the same one is a duplicate."""
        return json.dumps(self, sort_keys=True)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Request:
        """That of a line."""
        return cls(*(line[name] for name in cls._fields))


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All runs of a folder's files by identity, the first of each."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines.read(path):
            found.setdefault(Request.of(line).key, line)
    return found


class Lines:
    """The files of a folder, one for every suite, for one process at a time."""

    def __init__(self, folder: Path):
        """Reads the lines that are there."""
        self.folder, self.runs = folder, read(folder)

    def append(self, line: dict[str, Any]) -> None:
        """Adds a run that has ended."""
        _lines.append(self.folder / f"{line['suite']}.jsonl", line)
        self.runs[Request.of(line).key] = line


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
    tunings = {method: tuning_of(suite, method, runs) for method in suite.methods}
    known = {method: x for method, x in tunings.items() if x is not None}
    wanted = [
        Request(suite.name, method, known[method].next or {}, TUNING_SEED)
        for method in sorted(known, key=lambda method: len(known[method].found))
        if known[method].next is not None
    ]
    if not wanted and len(known) == len(tunings):
        best = {method: best_of(x.found) for method, x in known.items()}
        wanted = [Request(suite.name, x, best[x], seed) for seed in suite.seeds for x in best]
    return next((x for x in wanted if x.key not in runs and x.key not in begun), None)


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


def ended(suite: Suite, runs: Runs) -> dict[str, Result]:
    """The methods whose seeds have all run."""
    found = results(suite, runs)
    return {name: x for name, x in found.items() if len(x.finals) == len(suite.seeds)}


def count(suite: Suite, runs: Runs) -> int:
    """Runs of a suite that are there and that its plan asks for."""
    found = [x for x in results(suite, runs).values() if x.tuning is not None]
    return sum(len(x.tuning.found) + len(x.finals) for x in found)


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
