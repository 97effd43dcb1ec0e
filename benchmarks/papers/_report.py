"""What the scripts of this folder leave behind: a Markdown table, its numbers as JSON, a figure."""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent.parent / "results" / "papers"
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "matplotlib")

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
