"""Figures and tables of the papers.

    python -m benchmarks papers                            # what there is
    python -m benchmarks papers quantization foam_proxy    # these, one after the other
    python -m benchmarks papers all --full                 # all of them, at full size: hours

Each is a script that also runs by itself (`python -m benchmarks.papers.quantization`), with its own
help. `--full` goes to those that have it; `--seed` and `--out` to all.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

FOLDER = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Every script and its source."""
    paths = sorted(FOLDER.glob("[a-z]*.py"))
    return {path.stem: path.read_text() for path in paths}


def commands(names: list[str], full: bool, rest: list[str]) -> list[list[str]]:
    """What runs each of them, in a process of its own."""
    sources = scripts()
    return [
        [sys.executable, "-m", f"benchmarks.papers.{name}"]
        + ["--full"] * (full and "--full" in sources[name])
        + rest
        for name in names
    ]


def main() -> None:
    """Runs the scripts that the arguments name, or lists all."""
    known = scripts()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="of scripts, or all; without names, a list")
    add("--full", action="store_true", help="the larger size, of those that have one")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--out", type=Path, help="where the results go")
    args = parser.parse_args()
    if not args.names:
        width = max(map(len, known))
        for name, source in known.items():
            line = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            print(f"  {name:{width}}  {line}")
        return
    if unknown := set(args.names) - {*known, "all"}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rest = ["--seed", str(args.seed)] if args.seed else []
    rest += ["--out", str(args.out)] if args.out else []
    names = list(known) if "all" in args.names else args.names
    failed = [
        command[2]
        for command in tqdm(commands(names, args.full, rest), desc="papers", file=sys.stderr)
        if subprocess.run(command, cwd=FOLDER.parents[1]).returncode
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
