"""The runs of the sweep: a line for every one that has ended, in a file for every suite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import _lines

IDENTITY = ("suite", "method", "values", "seed")
"""The identity of a run; a second line with the same one is a duplicate."""


def key_of(line: Mapping[str, Any]) -> str:
    """A run's identity as text."""
    return json.dumps([line[name] for name in IDENTITY], sort_keys=True)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All runs of a folder's files by identity, the first of each."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines.read(path):
            found.setdefault(key_of(line), line)
    return found


class Lines:
    """The files of a folder, for one process at a time."""

    def __init__(self, folder: Path):
        """Reads the lines that are there."""
        self.folder, self.runs = folder, read(folder)

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a run that is not there yet."""
        if key_of(line) not in self.runs:
            _lines.append(self.folder / f"{line['suite']}.jsonl", line)
            self.runs[key_of(line)] = dict(line)
