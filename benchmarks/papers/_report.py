"""What the scripts of this folder leave behind: a Markdown table, its numbers as JSON, a figure."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .._record import (
    BLACK,
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    machine,
    table,
)
from .._record import FOLDER as _FOLDER

__all__ = [
    "BLACK",
    "BLUE",
    "COLORS",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "SKY",
    "VERMILION",
    "arguments",
    "machine",
    "table",
    "write",
]

FOLDER = _FOLDER / "papers"


def arguments(doc: str | None, full: str | None = None) -> argparse.Namespace:
    """`--full`, if there is a larger size and `full` describes it; `--seed`; and `--out`."""
    description, _, _ = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    if full is None:
        parser.set_defaults(full=False)
    else:
        parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the results go")
    return parser.parse_args()


def write(
    args: argparse.Namespace,
    name: str,
    title: str,
    body: str,
    settings: dict[str, Any],
    results: dict[str, Any],
    figure: Figure,
) -> None:
    """Writes `<name>.md`, `.json` and `.png` (`<name>_full` with `--full`), and prints the first.

    Args:
      args: what `arguments` returned.
      name: the script's.
      title: heading of the Markdown page.
      body: its tables and what there is to say about them.
      settings: sizes of the experiment.
      results: the numbers behind table and figure.
      figure: the figure.
    """
    command = shlex.join(["python", "-m", f"benchmarks.papers.{name}", *sys.argv[1:]])
    about = {"command": command, "seed": args.seed, **machine()}
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    page = (
        f"# {title}\n\n{body}\n\n`{command}`, seed {args.seed}, on {about['hardware']}; "
        f"{versions}.\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (name + ("_full" if args.full else ""))
    path.with_suffix(".md").write_text(page)
    data = {**about, "settings": settings, **results}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    path.with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    figure.savefig(path.with_suffix(".png"), dpi=150)
    print(page)
