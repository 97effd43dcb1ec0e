"""What the guards cost: steps with them over steps without, measured in turns in one run.

    python -m benchmarks.guard_cost                  # about 15 minutes on two CPU cores
    python -m benchmarks.guard_cost --rounds 5       # only to see that it works

*Update alone*: RACS's and Muon's update of 12 layers (`_trees.py`), state donated; bound 1.10.
*Training step*: the model of `examples/train_lm.py` (4 layers of width 128), state donated; bound
1.03.
Without guards, the optimizer is made while both of them, that of the matrices and that of AdamW's
leaves, are replaced by nothing; no argument of a method does that. Low-rank methods are not here:
they look at their projections, which is part of them and cannot be taken out.

Programs take turns, the order of each pair alternates, and medians are compared. The last column is
the guarded program against itself, compiled a second time: what the measurement cannot tell apart.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import optax
from tqdm import tqdm

import curvax
from benchmarks._timing import Program
from benchmarks._training_step import Make, corpus_for, training_step
from benchmarks._trees import layers
from benchmarks.papers import _report

RESULT = Path(__file__).parent / "results" / "guard_cost.md"
NAMES = ("with", "without", "with, again")

UPDATES: dict[str, Make] = {
    "racs": functools.partial(curvax.racs, matrices=curvax.MatrixRule(output_layer=None)),
    "muon": curvax.muon,
}
TRAINED: dict[str, Make] = {
    "racs": curvax.racs,
    "muon": curvax.muon,
    "asgo": functools.partial(curvax.asgo, refresh=10),
    "shampoo": functools.partial(curvax.shampoo, refresh=20, base=None),
    "soap": functools.partial(curvax.soap, refresh=20),
}
UPDATE_BOUND, STEP_BOUND = 1.10, 1.03


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Optimizers made inside have no guards."""
    assemble = importlib.import_module("curvax.optimizers._assemble")
    view = assemble.on_matrices

    def without(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        return view(*args, **{**kwargs, "guard": False})

    with (
        mock.patch.object(assemble, "on_matrices", without),
        mock.patch.object(assemble, "guard_leaves", optax.with_extra_args_support),
    ):
        yield


def update_of(make: Make) -> Program:
    """An update alone."""
    gradient = layers()
    optimizer = make(0.02)

    def step(state: Any, gradient: Any) -> Any:
        return optimizer.update(gradient, state, gradient)[::-1]

    return Program(step, jax.jit(optimizer.init)(gradient), gradient)


def measure(program: Callable[[], Program], rounds: int, name: str) -> dict[str, float]:
    """Milliseconds with guards, without, and with them once more."""
    programs = {"with": program()}
    with unguarded():
        programs["without"] = program()
    programs["with, again"] = program()
    for which, made in programs.items():
        counters = [
            path for path, _ in jax.tree_util.tree_leaves_with_path(made.state) if is_counter(path)
        ]
        assert bool(counters) == (which != "without"), f"{which}: {counters}"
    for i in tqdm(range(rounds + 1), desc=name, leave=False, file=sys.stderr):
        for which in NAMES[:: (-1) ** i]:
            programs[which].run()
    return {which: programs[which].median for which in NAMES}


def is_counter(path: Any) -> bool:
    """Whether a place in a state is that of a guard's counter."""
    return any(mark in jax.tree_util.keystr(path) for mark in ("skipped", "counts["))


def row(name: str, ms: dict[str, float], bound: float) -> list[str]:
    """One line of a table."""
    ratio, noise = ms["with"] / ms["without"], ms["with, again"] / ms["with"]
    verdict = "within" if ratio <= bound else "**beyond**"
    return [
        f"`{name}`",
        *(f"{ms[which]:.2f}" for which in ("with", "without")),
        f"{ratio:.3f}",
        f"{bound:.2f}, {verdict}",
        f"{noise:.3f}",
    ]


TITLES = ("method", "with, ms", "without, ms", "ratio", "bound", "with / with")


def main() -> None:
    """Prints both tables and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="of every program (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--out", type=Path, default=RESULT, help="(%(default)s)")
    args = parser.parse_args()
    updates = [
        row(name, measure(lambda: update_of(make), args.rounds, name), UPDATE_BOUND)  # noqa: B023
        for name, make in UPDATES.items()
        if name in args.methods
    ]
    corpus = corpus_for()
    steps = [
        row(
            name,
            measure(lambda: training_step(TRAINED[name], corpus), args.rounds, f"training, {name}"),  # noqa: B023
            STEP_BOUND,
        )
        for name in args.methods
    ]
    about = _report.machine()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    command = shlex.join(["python", "-m", "benchmarks.guard_cost", *sys.argv[1:]])
    text = "\n".join(
        [
            "# What the guards cost",
            "",
            f"`{command}`: medians of {args.rounds} rounds. The programs and the columns are "
            "described in `benchmarks/guard_cost.py`.",
            "",
            f"{about['hardware']}; {versions}.",
            "",
            "## The update alone, 12 layers of width 256",
            "",
            _report.table(TITLES, updates),
            "",
            "## A training step of the example's model",
            "",
            _report.table(TITLES, steps),
            "",
        ]
    )
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)


if __name__ == "__main__":
    main()
