"""Loss, and steps and seconds to AdamW's loss, of every method, tuned as AdamW is.

    python -m benchmarks train                              # all methods: most of an hour
    python -m benchmarks train --methods muon,racs --only lm
    python -m benchmarks train --preset gpu --text book.txt # a GPT of 85 million parameters: a day

The models are those of `examples/train_lm.py` and `examples/train_digits.py`, the optimizers all of
the library's and their peers in Optax; AdamW always takes part. How learning rates are found is
told in `_tuning.py`: the same grid for all, every best value inside it, then three other seeds.

A run that is finished is kept under runs/tuned until a source of the library, of the tasks or of
the training changes, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _record
from ._curves import spread, table_of_tunings
from ._optimizers import NAMES, methods_for
from ._tasks import DIGITS, LM, TASKS, Task
from ._tuning import Found, Study, finite

ADAMW = "optax.adamw"
Rows = Mapping[str, dict[str, Any]]  # by method
TITLES = {"lm": "A small language model", "digits": "Handwritten digits"}
PRESETS: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {"lm": LM, "digits": DIGITS},
    "gpu": {
        "lm": {"steps": 2000, "batch": 64, "context": 256, "width": 768, "depth": 12},
        "digits": DIGITS,
    },
}

COLUMNS = {
    "method": ("method", ""),
    "rate": ("learning rate", "g"),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond AdamW's", ""),
    "accuracy": ("test accuracy, %, mean (range)", ""),
    "steps": ("steps to AdamW's loss, over AdamW's", ".2f"),
    "time": ("time to it, over AdamW's", ".2f"),
    "ms": ("ms/step", ".1f"),
    "ms_over_adamw": ("over AdamW's", ".2f"),
    "compile_seconds": ("compile, s", ".1f"),
    "state_mb": ("state, MB", ".2f"),
}


# Tables.


def shares(values: Sequence[float], whole: float) -> float | str:
    """The mean of the reached values, over the whole; in words where a seed never got there."""
    reached = [value / whole for value in values if math.isfinite(value)]
    if len(reached) == len(values):
        return float(np.mean(reached))
    return f"{np.mean(reached):.2f} ({len(reached)} of {len(values)})" if reached else "never"


def row_of(name: str, x: Found, adamw: Found) -> dict[str, Any]:
    """A method's figures, those that are printed and those behind them."""
    steps = [run.steps_to(target) for run, target in zip(x.runs, adamw.losses, strict=True)]
    all_steps, whole = x.runs[0].steps[-1], adamw.seconds[-1]
    times = [x.seconds_at(step) for step in steps]
    accuracies = [100 * run.tested["accuracy"] for run in x.runs if "accuracy" in run.tested]
    return {
        "method": name,
        "rate": x.rate,
        "loss": spread(x.losses, ".3f"),
        "beyond": "" if x is adamw else spread(x.losses - adamw.losses, "+.3f"),
        "accuracy": spread(accuracies, ".1f") if accuracies else None,
        "steps": shares(steps, all_steps),
        "time": shares(times, whole),
        "ms": 1e3 * x.seconds[-1] / all_steps,
        "ms_over_adamw": x.seconds[-1] / whole,
        "compile_seconds": x.compile_seconds,
        "state_mb": x.state_bytes / 1e6,
        "losses_by_seed": [finite(loss) for loss in x.losses],
        "accuracy_by_seed": accuracies or None,
        "steps_by_seed": [finite(step) for step in steps],
        "seconds_by_seed": [finite(time) for time in times],
        "tuning": {f"{rate:g}": finite(loss) for rate, loss in x.tuning.items()},
    }


def verdict(rows: Rows) -> str:
    """Who ends below AdamW with every seed and who above, and who is there in less time."""
    adamw = losses_of(rows[ADAMW])
    others = {name: losses_of(row) for name, row in rows.items() if name != ADAMW}
    times = {name: rows[name]["time"] for name in others}
    said = {
        "Below AdamW with every seed": [n for n, x in others.items() if (x < adamw).all()],
        "above it with every seed": [n for n, x in others.items() if (x > adamw).all()],
        "at its loss, with every seed, in less time": [
            name for name, time in times.items() if isinstance(time, float) and time < 1
        ],
    }
    return "; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in said.items()) + "."


def losses_of(row: Mapping[str, Any]) -> np.ndarray:
    """By seed."""
    return infinite(row["losses_by_seed"])


def infinite(values: Sequence[float | None]) -> np.ndarray:
    """The inverse of `finite`."""
    return np.array([math.inf if value is None else value for value in values])


def tables_of(study: Study, rows: Rows) -> list[_record.Table]:
    """The comparison, best loss first, and the tuning."""
    task = study.task
    columns = {key: x for key, x in COLUMNS.items() if rows[ADAMW][key] is not None}
    notes = [study.head(), verdict(rows)]
    title = TITLES[task.name]
    best_first = sorted(rows.values(), key=lambda row: losses_of(row).mean())
    tunings = {name: tuning_of(row) for name, row in rows.items()}
    tuning = table_of_tunings(tunings, study.seed, f"{title}: the tuning")
    known = methods_for(task)
    calls = "; ".join(f"{name}: `{known[name].call}`" for name in rows)
    return [
        _record.Table(title, columns, best_first, "\n\n".join(notes)),
        tuning._replace(note=f"{tuning.note} Calls: {calls}."),
    ]


def tuning_of(row: Mapping[str, Any]) -> dict[float, float]:
    """Losses by learning rate."""
    rates, losses = map(float, row["tuning"]), infinite([*row["tuning"].values()])
    return dict(zip(rates, map(float, losses), strict=True))


# The command.


def about(studies: Sequence[Study]) -> str:
    """The note of the page."""
    runs = sum(len(study.runs) for study in studies)
    cached = runs - sum(study.trained for study in studies)
    parts = [
        "All optimizers are tuned over the same learning rates. *Beyond AdamW's*, *steps* and "
        "*time* are taken seed by seed. *Steps*: the step at which the validation loss first "
        "reaches that of AdamW's last step, interpolated linearly between evaluations, over the "
        "steps of the run. *Time*: the same in seconds, over AdamW's seconds for the whole run. "
        "Smaller is better; below 1 is sooner than AdamW's end (AdamW itself may have been there "
        "before). *Never*: no seed reaches it; if only some do, their number is in parentheses. "
        "*ms/step*: time between evaluations, the median of the three seeds, with refreshes and "
        "without evaluations and compilation. The methods take turns.",
        "Each method has its own defaults, except for the rank (a quarter of the width) and "
        "periods that fit the length of a run. `optax.contrib.muon` and `optax.contrib.galore` "
        "treat exactly the arrays with two axes as matrices, embeddings included; here they were "
        "given the axes of every kernel, and embeddings went to AdamW. Shampoo's base is AdamW. "
        "The 4-bit forms have `curvax.cholesky(error_feedback=0.95)` for Shampoo and "
        "`curvax.quantized()` for SOAP and ASGO.",
    ]
    if cached:
        parts.append(f"{cached} of the {runs} runs came from the cache.")
    return "\n\n".join(parts)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = _record.arguments(__doc__, tuple(TASKS))
    add = parser.add_argument
    help = "compared besides AdamW, separated by commas"
    add("--methods", type=_record.names(NAMES), default=NAMES, help=f"{help} ({', '.join(NAMES)})")
    add("--text", help="for lm, a UTF-8 file in the place of Python's documentation")
    for name in LM:
        add(f"--{name}", type=int, help="in the place of the preset's")
    return parser.parse_args()


def make_task(name: str, args: argparse.Namespace) -> Task:
    """A task at the preset's sizes, or the arguments'."""
    sizes = dict(PRESETS[args.preset][name])
    sizes |= {key: value for key in sizes if (value := getattr(args, key)) is not None}
    return TASKS[name](text=args.text, **sizes) if name == "lm" else TASKS[name](**sizes)


def main() -> None:
    """Trains the methods of the arguments and prints the comparison."""
    args = parse()
    tables, settings, studies = [], {}, []
    for name in args.only:
        task = make_task(name, args)
        known = methods_for(task)
        methods = {n: known[n] for n in NAMES if n in args.methods or n == ADAMW}
        study = Study(task, methods.values(), args.seed).run()
        found = study.find_all(methods)
        rows = {n: row_of(n, x, found[ADAMW]) for n, x in found.items()}
        tables += tables_of(study, rows)
        settings[name] = study.settings()
        studies.append(study)
    title = "Training with tuned optimizers"
    _record.write(args, "train", title, about(studies), tables, settings)


if __name__ == "__main__":
    main()
