"""The record of a sweep: one JSON line for every finished run, and nothing else.

A line is written when its run has ended, in one piece, and is on the disk before the next run
starts. What a crash leaves of a torn last line is cut off; a run that is there twice counts once.
So a sweep may be killed at any moment and loses the run that it was in.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

IDENTITY = ("suite", "method", "values", "seed")
"""What tells one run from another; a second line with the same is a duplicate."""


def key_of(line: Mapping[str, Any]) -> str:
    """A run's identity as text."""
    return json.dumps([line[name] for name in IDENTITY], sort_keys=True)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All runs of a folder's files by identity, the first of each; torn last lines are left out.

    Raises:
      ValueError: if another line is not a run; it names the file and the line.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        *whole, _torn = path.read_text().split("\n")
        for number, text in enumerate(whole, 1):
            try:
                line = json.loads(text)
                found.setdefault(key_of(line), line)
            except (ValueError, KeyError, TypeError) as error:
                about = f"is not a run ({error!r}): {text[:80]!r}"
                raise ValueError(f"{path}, line {number} {about}") from None
    return found


class Lines:
    """The files of a folder, one for every suite, open for one process alone."""

    def __init__(self, folder: Path):
        """Locks the folder, cuts off torn last lines, and reads the rest.

        Raises:
          ValueError: if another process has it open.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lock = folder, os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise ValueError(f"another process writes to {folder}.") from None
        for path in folder.glob("*.jsonl"):
            whole = path.read_bytes().rfind(b"\n") + 1
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        self.runs = read(folder)

    def __enter__(self) -> Lines:
        """For `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Unlocks the folder."""
        os.close(self.lock)

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a run that is not there yet; it is on the disk when this returns."""
        if key_of(line) in self.runs:
            return
        text = json.dumps(line, allow_nan=False)
        with (self.folder / f"{line['suite']}.jsonl").open("a") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        self.runs[key_of(line)] = json.loads(text)
