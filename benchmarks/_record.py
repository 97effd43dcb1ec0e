"""The record of a measurement: Markdown tables, their numbers as JSON, figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "matplotlib")
VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "XLA_FLAGS",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)

# Okabe and Ito's palette, which color-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)


class Table(NamedTuple):
    """Rows of numbers and how to print them."""

    title: str
    columns: Mapping[str, tuple[str, str]]  # by a row's keys: heading and format, such as ".2f"
    rows: list[dict[str, Any]]
    note: str = ""

    def markdown(self) -> str:
        """Title, note and the table; cells without a number stay empty."""
        titles = [heading for heading, _ in self.columns.values()]
        cells = [
            [cell(row.get(key), form) for key, (_, form) in self.columns.items()]
            for row in self.rows
        ]
        return "\n\n".join(filter(None, (f"## {self.title}", self.note, table(titles, cells))))


def cell(value: Any, form: str) -> str:
    """A value of a table as text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value if isinstance(value, str) else format(value, form)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column on the left and the others on the right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> dict[str, Any]:
    """The hardware and the versions that numbers depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(": ")[1] for x in lines if x.startswith("model name")), cpu)
    device = jax.devices()[0]
    hardware = f"{os.cpu_count()} cores of {cpu}"
    if device.platform != "cpu":
        hardware += f", {device.device_kind}"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "hardware": f"{hardware}, {device.platform} backend",
        "versions": {"python": platform.python_version(), **versions},
    }


def arguments(doc: str | None, sections: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The arguments of every suite: `--preset`, `--seed`, `--out`, and `--only` where it has
    sections."""
    description, _, _ = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    preset = "gpu" if jax.default_backend() == "gpu" else "cpu"
    help = "sizes for minutes on a CPU, or a GPU's (here %(default)s)"
    parser.add_argument("--preset", choices=("cpu", "gpu"), default=preset, help=help)
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the results go")
    if sections:
        help = f"some of {', '.join(sections)}, separated by commas"
        parser.add_argument("--only", type=names(sections), default=tuple(sections), help=help)
    return parser


def names(allowed: Sequence[str]) -> Any:
    """The type of an argument that lists some of these names, in which a comma has a space."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(re.split(r",(?! )", text))
        if unknown := set(chosen) - set(allowed):
            raise argparse.ArgumentTypeError(
                f"there is no {', '.join(sorted(unknown))}; there are {', '.join(allowed)}"
            )
        return chosen

    return parse


def write(
    args: argparse.Namespace,
    suite: str,
    title: str,
    about: str,
    tables: Sequence[Table],
    settings: Mapping[str, Any],
) -> None:
    """Writes `<suite>.md` and `.json`, and prints the first.

    Args:
      args: the result of the parser of `arguments`.
      suite: its name for `python -m benchmarks`.
      title: heading of the page.
      about: the measurement, in words.
      tables: the results.
      settings: sizes of the measurement.
    """
    body = "\n\n".join([about, *[t.markdown() for t in tables]])
    numbers = [
        {"title": t.title, "columns": {k: list(v) for k, v in t.columns.items()}, "rows": t.rows}
        for t in tables
    ]
    data = {"preset": args.preset, "settings": dict(settings), "tables": numbers}
    command = shlex.join(["python", "-m", "benchmarks", suite, *sys.argv[1:]])
    made = {"command": command, "seed": args.seed, **machine()}
    made["environment"] = {k: os.environ[k] for k in VARIABLES if k in os.environ}
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    variables = "".join(f" {name}={value}" for name, value in made["environment"].items())
    footer = f"`{command}`, seed {args.seed}, on {made['hardware']}; {versions}"
    page = f"# {title}\n\n{body}\n\n{footer}{f';{variables}' if variables else ''}.\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{suite}.md").write_text(page)
    (args.out / f"{suite}.json").write_text(json.dumps({**made, **data}, indent=1) + "\n")
    print(page)
