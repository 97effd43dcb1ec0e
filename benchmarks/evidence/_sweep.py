"""Running the plan, in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import curvax

from .. import _lines, _record, _training
from .._training import Program, Task
from ._methods import METHODS, optimizer, split
from ._plan import Lines, Request, count, upcoming
from ._suites import SUITES, TUNING_SEED, Suite

MOST_PROGRAMS = 48  # about 50 MB each


def digest_of_code() -> str:
    """A digest of the sources that decide numbers, written into every line."""
    package = Path(curvax.__file__).parent
    paths = sorted(package.glob("*.py"))
    for folder in (package / "optimizers", package / "transforms", Path(__file__).parent):
        paths += sorted(folder.rglob("*.py"))
    paths.append(Path(str(_training.__file__)))
    whole = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(whole).hexdigest()[:16]


class Runner:
    """Trains, with every program compiled once."""

    def __init__(self) -> None:
        """Knows no task yet."""
        self.about = _record.machine() | {"code": digest_of_code()}
        self.tasks: dict[str, Task] = {}
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

    def line(self, request: Request) -> dict[str, Any]:
        """The record of a run."""
        program = self.program(request)
        _, values = split(request.values)
        begin = time.time()
        last = request.seed == TUNING_SEED or request.method not in METHODS
        found = program.train(values, request.seed, last)
        return {
            **request._asdict(),
            "cpu_seconds": found.pop("seconds"),
            **found,
            "parameters": sum(x.size for x in jax.tree.leaves(program.like)),
            "sizes": dict(program.task.sizes),
            "wall_seconds": round(time.time() - begin, 1),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.about,
        }


def sweep(
    suites: Iterable[Suite], lines: Lines, limit: int | None = None, workers: int = 1
) -> None:
    """Makes the missing runs, suite after suite.

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
    started = 0
    bar = tqdm(total=whole, initial=there, unit="run", file=sys.stderr)
    with bar, contextlib.closing(Crew(workers)) as crew:
        while True:
            while crew.free and (limit is None or started < limit):
                found = (upcoming(suite, lines.runs, crew.running.values()) for suite in suites)
                request = next(filter(None, found), None)
                if request is None:
                    break
                bar.set_description(request.suite)
                crew.begin(request)
                started += 1
            if not crew.running:
                return
            for line in crew.ended():
                if "error" in line:
                    raise RuntimeError(line["error"])
                lines.append(line)
                bar.update()


class Crew:
    """Processes that train, a method in the one that has its program, if that is free."""

    def __init__(self, size: int) -> None:
        """With so many processes, each on a core: XLA's own threads would be on all of them."""
        self.workers = [_lines.Worker(_line, {}) for _ in range(size)]
        self.methods: list[set[str]] = [set() for _ in self.workers]
        self.running: dict[int, str] = {}  # the identity of a run, by the place of its process
        if size > 1 and hasattr(os, "sched_setaffinity"):
            cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
            for worker, core in zip(self.workers, cores, strict=False):
                os.sched_setaffinity(worker.process.pid, {core})

    def close(self) -> None:
        """Ends the processes."""
        for worker in self.workers:
            worker.end()

    @property
    def free(self) -> list[int]:
        """The places of processes without a run."""
        return [place for place in range(len(self.workers)) if place not in self.running]

    def begin(self, request: Request) -> None:
        """Gives a run to a free process."""
        knowing = [place for place in self.free if request.method in self.methods[place]]
        place = (knowing or sorted(self.free, key=lambda i: len(self.methods[i])))[0]
        self.methods[place].add(request.method)
        self.workers[place].pipe.send(tuple(request))
        self.running[place] = request.key

    def ended(self) -> list[dict[str, Any]]:
        """The lines of runs that have ended, at least one."""
        ready = connection.wait([self.workers[place].pipe for place in self.running])
        done = [place for place in self.running if self.workers[place].pipe in ready]
        for place in done:
            del self.running[place]
        return [self.workers[place].answer() or {} for place in done]


_runner = functools.cache(Runner)  # of a process


def _line(request: tuple[Any, ...]) -> dict[str, Any]:
    return _runner().line(Request(*request))
