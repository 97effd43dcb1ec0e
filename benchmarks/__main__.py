"""Every measurement of the library behind one command.

    python -m benchmarks                                        # what there is
    python -m benchmarks step --preset cpu --methods muon,racs  # one of them
    python -m benchmarks step --help                            # its arguments

Each prints Markdown tables and writes them and their numbers as JSON to `--out`, by default
`benchmarks/results`, with versions, hardware, seed and command; `pages` writes these records into
`README.md` and the pages in `docs/`.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

# Not imported before one is chosen: some settle what JAX does before it starts.
SUITES = {
    "evidence": "evidence.command",
    "widths": "widths",
    "gpu": "gpu",
    "corpus": "corpus",
    "step": "step_time",
    "programs": "programs",
    "layouts": "layouts",
    "precision": "precision",
    "pages": "pages",
}


def first_line(module: str) -> str:
    """A module's description of itself."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> None:
    """Runs the suite that the arguments name, with the arguments after it, or lists all."""
    suites = {name: first_line(module) for name, module in SUITES.items()}
    width = max(map(len, suites))
    listing = "\n".join(f"  {name:{width}}  {line}" for name, line in suites.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measurements of curvax.",
        epilog=f"suites:\n{listing}\n\n`python -m benchmarks SUITE --help` has the arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="?", choices=SUITES, metavar="SUITE", help="see below")
    args = parser.parse_args(sys.argv[1:2])
    if args.suite is None:
        print(parser.format_help(), end="")
        return
    # The name in the help of a suite, which reads its arguments from the second on.
    sys.argv[:2] = [f"python -m benchmarks {args.suite}"]
    importlib.import_module(f"benchmarks.{SUITES[args.suite]}").main()


if __name__ == "__main__":
    main()
