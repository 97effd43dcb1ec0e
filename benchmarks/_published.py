"""The tables of `docs/published.md`, from `curvax.published.RUNS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvax.published import RUNS

from ._record import cell, table

PAPERS = {"li": "Li", "gong": "Gong", "an": "An", "refael": "Refael", "nam": "Nam"}
CODE = "the authors' code"


def runs_of(paper: str) -> str:
    """A table of a paper's runs, and the numbers that it leaves open."""
    found = {
        name: run
        for name, run in RUNS.items()
        if run.source.startswith(f"{PAPERS[paper]} ") or (paper == "nam" and CODE in run.source)
    }
    left = list(dict.fromkeys(run.open for run in found.values() if run.open))
    rows: dict[tuple[str, ...], list[str]] = {}  # those that differ in the storage alone are one
    for name, run in found.items():
        numbers = ", ".join(f"{k} {shown(x)}" for k, x in run.numbers.items() if k != "storage")
        row = (
            cell(run.learning_rate, ".3g"),
            numbers,
            str(run.schedule),
            cell(run.steps, ","),
            run.task,
            run.source.partition(", ")[2] if CODE not in run.source else CODE,
            f"{left.index(run.open) + 1}" if run.open else "",
        )
        rows.setdefault(row, []).append(f"`{name}`")
    titles = ["run", "peak", "numbers", "schedule", "steps", "batch and length", "where", "open"]
    return "\n\n".join(
        [
            table(titles, [[", ".join(names), *row] for row, names in rows.items()]),
            *(f"Open {i}: {text}" for i, text in enumerate(left, 1)),
        ]
    )


def shown(value: Any) -> str:
    """A number; a base optimizer with its arguments."""
    if isinstance(value, Mapping):
        numbers = (f"{k} {shown(v)}" for k, v in value.items() if k != "optimizer")
        return f"{value['optimizer']}({', '.join(numbers)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
