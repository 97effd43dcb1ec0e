"""What runs next, which follows from the lines alone, and running it.

Of every suite AdamW is tuned first, because the other methods give it what is not a matrix. Then
all others take turns, so that they have had equally many runs at any moment. When all budgets are
spent, every method runs with the seeds, seed by seed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

import curvax

from .. import _record, _tasks, _training
from .._training import Program
from ._descent import Coordinate, Point, best_of, rounded, tried
from ._lines import IDENTITY, Lines, key_of
from ._methods import ADAM, METHODS, optimizer, split
from ._suites import SUITES, TUNING_SEED, Suite

MOST_PROGRAMS = 48  # about 50 MB each

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
    """Of a method in a suite."""

    found: list[tuple[Point, float]]  # points and losses, in the order of the descent
    next: Point | None  # None if the budget is spent

    @property
    def best(self) -> Point | None:
        """What the seeds run with, once the budget is spent."""
        return best_of(self.found) if self.next is None else None


def loss_of(line: Mapping[str, Any]) -> float:
    """Of a run at its end: infinite where it diverged."""
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
    there, point = (
        best_in(suite.after, name, runs) for name in ("adamw", METHODS[method].of or method)
    )
    if adamw is None or there is None or point is None:
        return None
    # What is not a matrix follows AdamW's rate from one suite to the next.
    return point | {"adam_rate": rounded(point["adam_rate"] * adamw["rate"] / there["rate"])}


def best_in(suite: str, method: str, runs: Runs) -> Point | None:
    """The best point of a method, once its budget is spent."""
    tuning = tuning_of(SUITES[suite], method, runs)
    return tuning and tuning.best


def coordinates_of(suite: Suite, method: str) -> tuple[Coordinate, ...]:
    """What is varied."""
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

    return Tuning(*tried(coordinates_of(suite, method), start, known, suite.budget))


def upcoming(suite: Suite, runs: Runs) -> Request | None:
    """The next run of a suite, or `None` if there is none left, or another suite has to end."""
    waiting: list[tuple[int, str, Point]] = []
    best: dict[str, Point] = {}
    for method in suite.methods:
        tuning = tuning_of(suite, method, runs)
        if tuning is None:
            continue
        if tuning.next is None:
            best[method] = best_of(tuning.found)
        else:
            waiting.append((len(tuning.found), method, tuning.next))
    if waiting:
        _, method, point = min(waiting, key=lambda x: x[0])
        return Request(suite.name, method, point, TUNING_SEED)
    if len(best) < len(suite.methods):
        return None
    for seed in suite.seeds:
        for method in suite.methods:
            request = Request(suite.name, method, best[method], seed)
            if request.key not in runs:
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
    """What is there and what is left, in runs and in hours of one thread."""
    rows = []
    for suite in suites:
        there = count(suite, runs)
        took = [line["wall_seconds"] for line in runs.values() if line["suite"] == suite.name]
        each = sum(took) / len(took) if took else math.nan
        row = [suite.name, f"{there}", f"{suite.runs}"]
        row += [f"{each:.0f}", f"{each * (suite.runs - there) / 3600:.1f}"] if took else ["", ""]
        rows.append(row)
    return _record.table(["suite", "runs", "of", "seconds each", "hours left"], rows)


def digest_of_code() -> str:
    """Of the sources that decide numbers, written into every line."""
    package = Path(curvax.__file__).parent
    paths = sorted(package.glob("*.py"))
    for folder in (package / "optimizers", package / "transforms", Path(__file__).parent):
        paths += sorted(folder.rglob("*.py"))
    paths += [Path(str(module.__file__)) for module in (_tasks, _training)]
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return {"python": platform.python_version(), **found}


class Runner:
    """Trains, with every program compiled once."""

    def __init__(self) -> None:
        """Knows no task yet."""
        self.about = {"hardware": _record.machine()["hardware"], "versions": versions()}
        self.about["code"] = digest_of_code()
        self.tasks: dict[str, _tasks.Task] = {}
        self.programs: dict[tuple[Any, ...], Program] = {}

    def program(self, request: Request) -> Program:
        """That of a suite, a method and its whole numbers."""
        suite = SUITES[request.suite]
        static, _ = split(request.values)
        key = suite.name, request.method, tuple(sorted(static.items()))
        if key not in self.programs:
            if len(self.programs) == MOST_PROGRAMS:
                del self.programs[next(iter(self.programs))]
            if suite.name not in self.tasks:
                self.tasks = {suite.name: suite.make(suite.steps)}  # one at a time: they hold data
                self.programs = {}
            schedule = suite.schedule()
            self.programs[key] = Program(
                lambda values: optimizer(request.method, schedule, static, values),
                suite.task(request.method, self.tasks[suite.name]),
                time.process_time,
            )
        return self.programs[key]

    def line(self, request: Request, told: Callable[[int, int], None]) -> dict[str, Any]:
        """The record of a run; a run whose loss is not finite ends early.

        Args:
          request: the run.
          told: is called after every stretch with the steps so far and of the whole.
        """
        program = self.program(request)
        steps = program.task.steps
        _, values = split(request.values)
        tuning = request.seed == TUNING_SEED
        begin = time.time()
        run = None
        for done, run in enumerate(program.train(values, request.seed, tuning), 1):
            told(min(done * program.task.eval_every, steps), steps)
            if not math.isfinite(run.training[-1]):
                break
        assert run is not None
        ended = run.steps[-1:] == [steps] and math.isfinite(run.losses[-1])
        return {
            **dict(zip(IDENTITY, request, strict=True)),
            "loss": run.losses[-1] if ended else None,
            "steps": run.steps,
            "losses": [x if math.isfinite(x) else None for x in run.losses],
            "cpu_seconds": [round(x, 3) for x in run.seconds],
            "tested": run.tested,
            "training": [x if math.isfinite(x) else None for x in run.training],
            "compile_seconds": round(run.compile_seconds, 1),
            "state_bytes": program.state_bytes(values),
            "parameters": sum(x.size for x in jax.tree.leaves(program.like)),
            "sizes": dict(program.task.sizes),
            "wall_seconds": round(time.time() - begin, 1),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.about,
        }


def sweep(suites: Iterable[Suite], lines: Lines, limit: int | None = None) -> int:
    """Runs what is missing, suite after suite; returns how many runs it made.

    Args:
      suites: in their order.
      lines: where runs are and go.
      limit: runs after which to stop.
    """
    suites = list(suites)
    runner, made = Runner(), 0
    there = sum(count(suite, lines.runs) for suite in suites)
    whole = sum(suite.runs for suite in suites)
    bar = tqdm(total=whole, initial=there, unit="run", file=sys.stderr, dynamic_ncols=True)
    for suite in suites:
        while limit is None or made < limit:
            request = upcoming(suite, lines.runs)
            if request is None:
                break
            bar.set_description(suite.name)

            def told(done: int, steps: int, request: Request = request) -> None:
                bar.set_postfix_str(f"{request.method}, seed {request.seed}: {done}/{steps}")

            lines.append(runner.line(request, told))
            made += 1
            bar.update()
    bar.close()
    return made
