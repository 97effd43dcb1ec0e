"""Running the plan, in this process or in several."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import curvax

from .. import _record, _tasks, _training
from .._training import Program
from ._lines import IDENTITY, Lines
from ._methods import METHODS, optimizer, split
from ._plan import Request, count, upcoming
from ._suites import SUITES, TUNING_SEED, Suite

MOST_PROGRAMS = 48  # about 50 MB each


def digest_of_code() -> str:
    """A digest of the sources that decide numbers, written into every line."""
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
    """The versions on which numbers depend."""
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
        """That of a suite, a method, its whole numbers and the names of its others."""
        suite = SUITES[request.suite]
        static, traced = split(request.values)
        key = suite.name, request.method, tuple(sorted(static.items())), tuple(sorted(traced))
        if key not in self.programs:
            if len(self.programs) == MOST_PROGRAMS:
                del self.programs[next(iter(self.programs))]
            if suite.name not in self.tasks:
                self.tasks = {suite.name: suite.make(suite.steps)}  # one at a time: they hold data
                self.programs = {}
            self.programs[key] = Program(
                lambda values: optimizer(request.method, suite.steps, static, values),
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
        last = request.seed == TUNING_SEED or request.method not in METHODS
        begin = time.time()
        run = None
        for done, run in enumerate(program.train(values, request.seed, last), 1):
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
            "step_bytes": program.step_bytes,
            "parameters": sum(x.size for x in jax.tree.leaves(program.like)),
            "sizes": dict(program.task.sizes),
            "wall_seconds": round(time.time() - begin, 1),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.about,
        }


def sweep(suites: Iterable[Suite], lines: Lines, limit: int | None = None, workers: int = 1) -> int:
    """Makes the missing runs, suite after suite; returns their number.

    Args:
      suites: in their order.
      lines: where runs are and go.
      limit: runs after which to stop.
      workers: processes that train at the same time. Those for whom a suite has no run yet, because
        each point follows from the last one's loss, begin the next suite.
    """
    suites = list(suites)
    there = sum(count(suite, lines.runs) for suite in suites)
    whole = sum(suite.runs for suite in suites)
    bar = tqdm(total=whole, initial=there, unit="run", file=sys.stderr, dynamic_ncols=True)
    crew = Alone(bar) if workers == 1 else Crew(workers)
    started = 0
    with bar, crew:
        while True:
            while crew.free and (limit is None or started < limit):
                found = (upcoming(suite, lines.runs, crew.begun) for suite in suites)
                request = next(filter(None, found), None)
                if request is None:
                    break
                bar.set_description(request.suite)
                crew.begin(request)
                started += 1
            if not crew.begun:
                return started
            for line in crew.ended():
                lines.append(line)
                bar.update()


class Alone:
    """Trains in this process, one run after the other, and shows their steps."""

    def __init__(self, bar: tqdm[Any]) -> None:
        """With the bar of the sweep."""
        self.runner, self.bar, self.begun = Runner(), bar, dict[str, Request]()

    def __enter__(self) -> None:
        """Nothing to start."""

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    @property
    def free(self) -> bool:
        """Whether a run can begin."""
        return not self.begun

    def begin(self, request: Request) -> None:
        """Takes a run."""
        self.begun[request.key] = request

    def ended(self) -> list[dict[str, Any]]:
        """Its line."""
        (request,) = self.begun.values()

        def told(done: int, steps: int) -> None:
            self.bar.set_postfix_str(f"{request.method}, seed {request.seed}: {done}/{steps}")

        line = self.runner.line(request, told)
        self.begun.clear()
        return [line]


class Crew:
    """Trains in several processes, a method in the one that has its program, if that is free."""

    def __init__(self, size: int) -> None:
        """With so many processes."""
        context = multiprocessing.get_context("spawn")  # JAX has threads, which a fork breaks
        self.pools = [ProcessPoolExecutor(1, context, _settle, (place,)) for place in range(size)]
        self.methods: list[set[str]] = [set() for _ in self.pools]
        self.running: dict[Future[dict[str, Any]], tuple[str, int]] = {}

    def __enter__(self) -> None:
        """Processes start with their first run."""

    def __exit__(self, *_: object) -> None:
        """Ends the processes, and drops the runs that did not begin."""
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def begun(self) -> set[str]:
        """The identities of the runs."""
        return {key for key, _ in self.running.values()}

    @property
    def free(self) -> list[int]:
        """The processes without a run."""
        busy = {place for _, place in self.running.values()}
        return [place for place in range(len(self.pools)) if place not in busy]

    def begin(self, request: Request) -> None:
        """Gives a run to a free process."""
        knowing = [place for place in self.free if request.method in self.methods[place]]
        place = (knowing or sorted(self.free, key=lambda i: len(self.methods[i])))[0]
        self.methods[place].add(request.method)
        self.running[self.pools[place].submit(_line, tuple(request))] = request.key, place

    def ended(self) -> list[dict[str, Any]]:
        """The lines of runs that have ended, at least one."""
        done, _ = wait(self.running, return_when=FIRST_COMPLETED)
        for future in done:
            del self.running[future]
        return [future.result() for future in done]


def _settle(place: int) -> None:
    """Keeps this process on one core: XLA's own threads would be on all of them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place % len(cores)]})


@functools.cache
def _runner() -> Runner:
    return Runner()


def _line(request: tuple[Any, ...]) -> dict[str, Any]:
    return _runner().line(Request(*request), lambda done, steps: None)
