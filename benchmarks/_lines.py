"""Measurements as lines of files: each is made once, and a sweep of hours goes on where it stopped.

A line is on the disk before the next measurement starts. Programs are compiled in processes of
their own, because a compiler that takes too long is given up.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

OVER = "over "
"""How the error of a cell begins that was given up."""


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


def add_arguments(parser: Any, kind: Any) -> None:
    """`--limit`, `--again`, `--lines`, and `--cell` for a `NamedTuple`."""
    add = parser.add_argument
    add("--limit", type=int, default=300, help="seconds of CPU for a cell (%(default)s)")
    add("--again", action="store_true", help="cells that are recorded too")
    add("--lines", type=Path, help="the file of lines, by default beside the results")
    add("--cell", type=lambda text: kind(*json.loads(text)), help="prints the line of one cell")


def print_one(args: Any, measured: Callable[[Any], dict[str, Any]]) -> None:
    """The line of `--cell`."""
    resource.setrlimit(resource.RLIMIT_CPU, (args.limit, args.limit + 60))
    print(json.dumps(measured(args.cell)))


def in_a_process(suite: str, cell: Any, limit: int) -> dict[str, Any]:
    """A suite's measurement of a cell, given up after so many seconds of all threads together."""
    command = [sys.executable, "-m", "benchmarks", suite, "--cell", json.dumps(cell)]
    done = subprocess.run([*command, "--limit", str(limit)], capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"error": f"{OVER}{limit} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return {"error": last[0][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def recorded(path: Path, kind: Any) -> dict[Any, dict[str, Any]]:
    """The lines of a file by their cell, the last of each."""
    return {kind(*(row[field] for field in kind._fields)): row for row in read(path)}


def extended(args: Any, suite: str, cells: Sequence[Any], kind: Any) -> dict[Any, dict[str, Any]]:
    """All lines of `<suite>.jsonl` by their cells, after those that were missing are measured."""
    path = args.lines or args.out / f"{suite}.jsonl"
    done = {} if args.again else recorded(path, kind)
    for cell in tqdm([x for x in cells if x not in done], desc=suite, file=sys.stderr):
        append(path, {**cell._asdict(), **in_a_process(suite, cell, args.limit)})
    return recorded(path, kind)
