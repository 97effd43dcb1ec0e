"""Losses of training with the decompositions that programs for TPUs have, beside LAPACK's.

    python -m benchmarks platforms                        # all methods with decompositions: an hour
    python -m benchmarks platforms --methods soap,alice --seeds 1,2

Runs are those of `train` on its language model, at the learning rates that it found, on a CPU: once
with LAPACK's decompositions, and once with the forms for TPUs (Jacobi's method, products, loops
over panels), of which GPUs share those of SVDs and polar factors. All products are in float32.
*Other rounding* is LAPACK's with every update scaled by 1 + 1e-6, which means nothing: what it
differs by is what a run differs by if anything at all is rounded in another way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from . import _record
from ._curves import spread
from ._optimizers import methods_for
from ._rows import forms_of_tpus
from ._tasks import LM, lm
from ._training import Method, Program
from ._tuning import finite
from .lossless import ADAMW, rounded, tuned_rates

SEEDS = (1, 2, 3)
METHODS = (
    *("swan", "osgdm", "asgo", "shampoo", "foam", "dr_shampoo", "soap", "eigen_adam"),
    *("kl_shampoo", "galore", "fira", "alice", "sumo", "dion"),
    *("asgo_4bit", "shampoo_4bit", "soap_4bit"),
)
LAPACK, ROUNDED, TPU = "LAPACK's", "LAPACK's, other rounding", "a TPU's"
FORMS = (LAPACK, ROUNDED, TPU)

COLUMNS = {
    "method": ("method", ""),
    "form": ("decompositions", ""),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond LAPACK's, seed by seed", ""),
    "mean": ("mean", "+.4f"),
}


def losses_of(
    method: Method, form: str, rate: float, adam_rate: float, seeds: Sequence[int]
) -> dict[int, float]:
    """The losses at the end, by seed."""
    task = lm()
    method = Method(rounded(method.make), method.options) if form == ROUNDED else method
    with forms_of_tpus() if form == TPU else contextlib.nullcontext():
        program = Program(functools.partial(method.optimizer, task), task)
        values = {"rate": rate, "adam_rate": adam_rate}
        runs = (list(program.train(values, seed, last=True))[-1] for seed in seeds)
        return {seed: run.loss for seed, run in zip(seeds, runs, strict=True)}


def rows_of(names: Iterable[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Three rows for every method."""
    methods, rates = methods_for(lm()), tuned_rates("lm")
    rows = []
    cells = [(name, form) for name in names for form in FORMS]
    plain: dict[int, float] = {}
    for name, form in tqdm(cells, unit="program", file=sys.stderr):
        losses = losses_of(methods[name], form, rates[name], rates[ADAMW], seeds)
        row: dict[str, Any] = {"method": name, "form": form, "loss": spread(losses.values(), ".3f")}
        if form == LAPACK:
            plain = losses
        else:
            beyond = [losses[seed] - plain[seed] for seed in seeds]
            row["beyond"] = ", ".join(f"{x:+.4f}" for x in beyond)
            row["mean"] = float(np.mean(beyond))
        rows.append(row | {"by_seed": {seed: finite(loss) for seed, loss in losses.items()}})
    return rows


def draw(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> Figure:
    """The differences from LAPACK's, one point a seed."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    axis = figure.subplots()
    by_cell = {(row["method"], row["form"]): row["by_seed"] for row in rows}
    looks = {ROUNDED: ("o", _record.ORANGE, -0.15), TPU: ("D", _record.BLUE, 0.15)}
    for form, (marker, color, shift) in looks.items():
        points = [
            (by_cell[name, form][seed] - by_cell[name, LAPACK][seed], i + shift)
            for i, name in enumerate(names)
            for seed in seeds
        ]
        axis.plot(*zip(*points, strict=True), marker, color=color, ls="", ms=5, label=form)
    axis.axvline(0, color="gray", lw=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1e-3)
    axis.set(xlabel="validation loss beyond that with LAPACK's decompositions, each seed")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(frameon=False)
    return figure


def main() -> None:
    """Trains, and prints the table."""
    parser = _record.arguments(__doc__)
    add = parser.add_argument
    add("--methods", type=_record.names(METHODS), default=METHODS, help="separated by commas")
    add("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=SEEDS)
    args = parser.parse_args()
    rows = rows_of(args.methods, args.seeds)
    about = (
        f"{lm().about}. Each method at the learning rate that `train` found for it, once with "
        "LAPACK's decompositions and once with the forms that its program for a TPU has, both on a "
        "CPU. *Other rounding*: LAPACK's, with every update scaled by 1 + 1e-6."
    )
    title = "Losses with a TPU's decompositions"
    table = _record.Table("A small language model", COLUMNS, rows)
    _record.write(args, "platforms", title, about, [table], draw(rows, args.seeds), {**LM})


if __name__ == "__main__":
    main()
