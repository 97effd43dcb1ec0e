"""Hypothesis looks for gradients that break a method: every method, 20 shapes.

    python -m benchmarks.fuzz --examples 10000            # about 10 minutes
    python -m benchmarks.fuzz --methods racs --examples 500

Strategy and properties are those of `tests/fuzzing.py`: updates and states are finite, bounded, and
the same in a second run; matrices of a batch do not influence each other; and where a method does
not depend on the gradient's scale, powers of two change no bit. Each method is compiled once for
each shape, and every pair of them has the same number of examples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import shlex
import sys
from collections import Counter
from pathlib import Path

# As in the tests: nothing is gained by optimizing programs that run a few hundred times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hypothesis
import jax
from fuzzing import SHAPES, Example, check, examples
from registry import REGISTRY, Row
from tqdm import tqdm

RESULT = Path(__file__).parent / "results" / "fuzz.md"


def search(
    row: Row, shape: tuple[int, int], count: int, seed: int, shrink: bool
) -> tuple[int, str | None]:
    """How many examples of a method and a shape ran, and what was found."""
    ran = 0
    phases = [hypothesis.Phase.generate, *[hypothesis.Phase.shrink] * shrink]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(examples())
    def holds(example: Example) -> None:
        nonlocal ran
        ran += 1
        check(row, shape, example)

    try:
        holds()
    except Exception as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return ran, f"{row.name}, {shape[0]}×{shape[1]}: {said.strip()}"
    return ran, None


def page(ran: Counter[str], found: list[str], command: str) -> str:
    """What is written to the results."""
    packages = ("jax", "jaxlib", "numpy", "optax", "hypothesis")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    head = (
        f"# What Hypothesis finds\n\n`{command}`: {ran.total():,} examples over {len(SHAPES)} "
        f"shapes, {len(found)} of the {len(ran) * len(SHAPES)} pairs of method and shape with a "
        f"counterexample. The properties are in `tests/fuzzing.py`.\n\n"
        f"Python {platform.python_version()}, {versions}, {jax.default_backend()} backend.\n"
    )
    rows = [
        f"| `{name}` | {count:,} | {sum(x.startswith(f'{name},') for x in found)} |"
        for name, count in ran.items()
    ]
    table = ["| method | examples | shapes with a counterexample |", "|---|---:|---:|", *rows]
    parts = [head, "\n".join(table)]
    parts += [f"\n```\n{x}\n```" for x in found]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Prints the page and writes it; exits with 1 if something was found."""
    names = [row.name for row in REGISTRY]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=10_000, help="at least (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--shrink", action="store_true", help="look for simple counterexamples")
    parser.add_argument("--out", type=Path, default=RESULT, help="(%(default)s)")
    args = parser.parse_args()
    rows = [row for row in REGISTRY if row.name in args.methods]
    pairs = [(row, shape) for row in rows for shape in SHAPES]
    count = math.ceil(args.examples / len(pairs))
    ran: Counter[str] = Counter()
    found = []
    bar = tqdm(pairs, unit="pair", file=sys.stderr)
    for i, (row, shape) in enumerate(bar):
        bar.set_postfix_str(f"{row.name}, {shape[0]}×{shape[1]}, {len(found)} found")
        number, what = search(row, shape, count, args.seed + i, args.shrink)
        ran[row.name] += number
        found += [] if what is None else [what]
    words = ["python", "-m", "benchmarks.fuzz", *sys.argv[1:]]
    text = page(ran, found, shlex.join(words))
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
