"""Measurements as lines of files: each is made once, and a sweep of hours goes on where it stopped.

A line is on the disk before the next measurement starts. Measurements that fail, hang or crash run
in processes of their own, and leave the reason.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a last one that a crash has torn."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def append(path: Path, line: Any) -> None:
    """Adds a line, in the place of a last one that a crash has torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{json.dumps(line, allow_nan=False)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def recorded(path: Path, kind: Any) -> dict[Any, dict[str, Any]]:
    """The lines of a file by their cell, a `NamedTuple`, the last of each."""
    return {kind(*(row[field] for field in kind._fields)): row for row in read(path)}


class Worker:
    """A process that measures one job after the other, and that ends with this one.

    Args:
      measure: the measurement of a job, whose errors are measurements too.
      variables: of its environment, where they are not set.
    """

    def __init__(self, measure: Callable[[Any], dict[str, Any]], variables: Mapping[str, str]):
        """Starts it; JAX has threads, which a fork breaks."""
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process: Any = context.Process(target=_answer, args=(measure, there), daemon=True)
        with mock.patch.dict(os.environ, {**variables, **os.environ}):
            self.process.start()
        there.close()

    def ask(self, job: Any, limit: float | None = None) -> dict[str, Any] | None:
        """The measurement of a job; `None` if the limit came first."""
        with contextlib.suppress(OSError):  # it has died
            self.pipe.send(job)
        return self.answer(limit)

    def answer(self, limit: float | None = None) -> dict[str, Any] | None:
        """The measurement that it makes, `None` for what is not finite in it."""
        if not self.pipe.poll(limit):
            self.end()
            return None
        try:
            return json.loads(self.pipe.recv(), parse_constant=lambda _: None)
        except (EOFError, OSError):
            self.end()
            code = self.process.exitcode
            reason = signal.Signals(-code).name if code < 0 else code
            return {"error": f"the process ended with {reason}"}

    def end(self) -> None:
        """Kills the process and its children."""
        if not self.pipe.closed:
            self.pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()


def _answer(measure: Callable[[Any], dict[str, Any]], pipe: Any) -> None:
    os.setsid()
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os.killpg(0, 9)), daemon=True).start()
    with contextlib.suppress(EOFError):  # the other end is closed
        while True:
            job = pipe.recv()
            try:
                found = measure(job)
            except Exception as error:  # the queue goes on
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            pipe.send(json.dumps(found))
