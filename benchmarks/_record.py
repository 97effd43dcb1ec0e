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
VARIABLES = ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "MALLOC_ARENA_MAX")
VARIABLES += ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which color-blind readers can tell apart."""


class Table(NamedTuple):
    """Rows of numbers and how to print them."""

    title: str
    columns: Mapping[str, tuple[str, str]]  # by a row's keys: heading and format, such as ".2f"
    rows: list[dict[str, Any]]
    note: str = ""

    def markdown(self) -> str:
        """Title, note and the table, without columns in which no row has anything."""
        said = {key for row in self.rows for key, x in row.items() if cell(x, "")}
        columns = {key: x for key, x in self.columns.items() if key in said}
        titles = [heading for heading, _ in columns.values()]
        cells = [[cell(row.get(k), form) for k, (_, form) in columns.items()] for row in self.rows]
        found = (f"## {self.title}", self.note, table(titles, cells) if said else "")
        return "\n\n".join(filter(None, found))


def cell(value: Any, form: str) -> str:
    """A value of a table as text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value if isinstance(value, str) else format(value, form)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table, so many first columns on the left and the others on the right."""
    marks = [["---", "---:"][i >= words] for i in range(len(titles))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, marks, *rows))


def rows_in(text: str) -> list[dict[str, str]]:
    """The rows of a Markdown table by their headings."""
    lines = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def section(page: str, title: str) -> str:
    """What a page of the results has below a heading."""
    text = (FOLDER / f"{page}.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


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


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that describes itself by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def arguments(doc: str | None, sections: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The arguments of every suite; `--only` where it has sections."""
    parser = parser_of(doc)
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
      args: of the parser of `arguments`; they are not repeated among `settings`.
      suite: its name for `python -m benchmarks`.
      title: the heading of the page.
      about: the measurement, in words.
      tables: the results.
      settings: sizes of the measurement.
    """
    body = "\n\n".join([about, *[t.markdown() for t in tables]])
    data = {"preset": args.preset, "settings": settings, "tables": [t._asdict() for t in tables]}
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
