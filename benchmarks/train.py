"""Loss, and steps and seconds to AdamW's loss, of every method, tuned as AdamW is.

    python -m benchmarks train                              # all methods: most of an hour
    python -m benchmarks train --methods muon,racs --only lm
    python -m benchmarks train --methods dion --add         # to the record, on its grids
    python -m benchmarks train --preset gpu --text book.txt # a GPT of 85 million parameters: a day

With `--add` the methods join the record in the folder of results: on its learning rates, if AdamW
has the record's losses. Their times over AdamW's are then what the record takes from this run.

The models are those of `examples/train_lm.py` and `examples/train_digits.py`, the optimizers all of
the library's and their peers in Optax; AdamW always takes part. How learning rates are found is
told in `_tuning.py`: the same grid for all, every best value inside it, then three other seeds.

A run that is finished is kept under runs/tuned until a source of the library, of the tasks or of
the training changes, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from . import _record
from ._curves import limits, spread, table_of_tunings
from ._optimizers import FAMILIES, NAMES, methods_for
from ._tasks import DIGITS, LM, TASKS, Task
from ._tuning import GRID, Found, Study, finite

ADAMW = "optax.adamw"
Rows = Mapping[str, dict[str, Any]]  # by method
TITLES = {"lm": "A small language model", "digits": "Handwritten digits"}
SCALES = {"lm": "linear", "digits": "log"}
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
    """The mean of what was reached, over the whole; in words where a seed never got there."""
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
        "curve": curve_of(x),
    }


def curve_of(x: Found) -> dict[str, list[Any]]:
    """Every evaluation: seconds so far, and the loss of the seeds."""
    losses = x.curves[:, :, 1]
    bounds = {"mean": losses.mean(0), "min": losses.min(0), "max": losses.max(0)}
    about = {"steps": x.runs[0].steps, "seconds": x.seconds.tolist()}
    return about | {key: [finite(loss) for loss in values] for key, values in bounds.items()}


def verdict(rows: Rows) -> str:
    """Who ends below AdamW with every seed and who above, and who is there in less time."""
    adamw = losses_of(rows[ADAMW])
    others = {name: losses_of(row) for name, row in rows.items() if name != ADAMW}
    times = {name: rows[name]["time"] for name in others}
    said = {
        "Below AdamW with every seed": [n for n, x in others.items() if (x < adamw).all()],
        "above it with every seed": [n for n, x in others.items() if (x > adamw).all()],
        "at its loss, with every seed, in less time": [
            name
            for name, time in times.items()
            if isinstance(time, float) and time < 1 and "beside_other_work" not in rows[name]
        ],
    }
    return "; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in said.items()) + "."


def losses_of(row: Mapping[str, Any]) -> np.ndarray:
    """By seed."""
    return infinite(row["losses_by_seed"])


def infinite(values: Sequence[float | None]) -> np.ndarray:
    """The inverse of `finite`."""
    return np.array([math.inf if value is None else value for value in values])


def tables_of(study: Study, rows: Rows, image: str) -> list[_record.Table]:
    """The comparison, best loss first, and the tuning."""
    task = study.task
    columns = {key: x for key, x in COLUMNS.items() if rows[ADAMW][key] is not None}
    notes = [study.head(), verdict(rows)]
    notes += [f"![validation loss over steps and over seconds]({image})"]
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


# Adding to a record.


def added(old: Rows, new: Rows) -> Rows:
    """The rows of a record and those of another run, whose times become the record's.

    Raises:
      ValueError: if AdamW's losses differ.
    """
    ours, theirs = old[ADAMW], new[ADAMW]
    if not np.allclose(losses_of(ours), losses_of(theirs), rtol=1e-5):
        raise ValueError(
            f"AdamW's losses must be the record's, {ours['losses_by_seed']}; they are "
            f"{theirs['losses_by_seed']} here, so that all methods have to be trained again."
        )
    ratio = ours["ms"] / theirs["ms"]
    joined = {**old, **{name: in_time(row, ratio) for name, row in new.items() if name != ADAMW}}
    return {name: joined[name] for name in NAMES if name in joined}


def in_time(row: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """A row whose times are multiplied by a ratio."""
    times = {key: ratio * row[key] for key in ("ms", "compile_seconds")}
    by_seed = [None if x is None else ratio * x for x in row["seconds_by_seed"]]
    seconds = [ratio * x for x in row["curve"]["seconds"]]
    return {
        **row,
        **times,
        "seconds_by_seed": by_seed,
        "curve": {**row["curve"], "seconds": seconds},
    }


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The record to add to."""
    record = json.loads((args.out / "train.json").read_text())
    if (record["seed"], record["preset"]) != (args.seed, args.preset):
        raise ValueError(f"the record has seed {record['seed']} and preset {record['preset']!r}.")
    return record


def rows_in(record: Mapping[str, Any], task: Task) -> Rows:
    """Of one task, by method."""
    table = next(x for x in record["tables"] if x["title"] == TITLES[task.name])
    return {row["method"]: row for row in table["rows"]}


# Figures.


def draw(task: Task, rows: Rows) -> Figure:
    """A pair of panels for each family, loss against step and against seconds, with AdamW."""
    families = panels(rows)
    columns = min(3, len(families))
    lines = -(-len(families) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 1 + 6.4 * lines), layout="constrained")
    axes = figure.subplots(2 * lines, columns, squeeze=False, sharey=True)
    for axis in axes.flat:
        axis.set_visible(False)  # until something is drawn
    for i, (family, names) in enumerate(families.items()):
        line, column = divmod(i, columns)
        pair = axes[2 * line : 2 * line + 2, column]
        for axis, seconds in zip(pair, (False, True), strict=True):
            draw_family(axis, rows, names, seconds)
            if column == 0:
                axis.set(ylabel=f"validation loss ({task.unit})")
        pair[0].set(title=family)
        pair[0].legend(frameon=False, fontsize="small", loc="upper right")
    scale = SCALES[task.name]
    curves = [infinite(row["curve"][bound]) for row in rows.values() for bound in ("min", "max")]
    axes[0, 0].set(yscale=scale, ylim=limits(curves, scale))
    if scale == "log":
        axes[0, 0].yaxis.set(
            major_locator=LogLocator(subs=(1, 2, 5)),
            major_formatter=StrMethodFormatter("{x:g}"),
            minor_locator=NullLocator(),
        )
    figure.suptitle(
        f"{TITLES[task.name]}: every method at its own best learning rate\n"
        "lines: mean of three seeds, shaded: their range; dotted: AdamW's loss at the end",
        fontsize="medium",
    )
    return figure


def panels(rows: Rows) -> dict[str, list[str]]:
    """The families that were measured; what is in 4 bits has its form in float32 beside it."""
    families: dict[str, list[str]] = {}
    for family, names in FAMILIES.items():
        forms = [form for name in names for form in (name.removesuffix("_4bit"), name)]
        there = [name for name in dict.fromkeys(forms) if name in rows]
        if rows.keys() & set(names):
            families[family[0].upper() + family[1:]] = there
    return families or {"AdamW": []}


def draw_family(axis: Axes, rows: Rows, names: Sequence[str], seconds: bool) -> None:
    """The curves of some methods, and AdamW's."""
    axis.set_visible(True)
    axis.set(xlabel="seconds of training" if seconds else "step")
    axis.axhline(float(losses_of(rows[ADAMW]).mean()), color="gray", lw=0.9, linestyle=":")
    for name in (ADAMW, *names):
        curve = rows[name]["curve"]
        over = curve["seconds" if seconds else "steps"]
        mean, low, high = (infinite(curve[key]) for key in ("mean", "min", "max"))
        color, style = ("gray", "-") if name == ADAMW else look_of(name, names)
        axis.plot(over, mean, style, color=color, label=name)
        axis.fill_between(over, low, high, color=color, alpha=0.2, lw=0)
    axis.grid(alpha=0.3)


def core(name: str) -> str:
    """What a method is a form of."""
    return name.rpartition(".")[2].removesuffix("_4bit")


def look_of(name: str, names: Sequence[str]) -> tuple[str, str]:
    """One color for all forms of a method; dashed is Optax's, or float32 beside 4 bits."""
    dashed = name.startswith("optax.") or f"{name}_4bit" in names
    index = list(dict.fromkeys(map(core, names))).index(core(name))
    return _record.COLORS[index], "--" if dashed else "-"


# The command.


def about(studies: Sequence[Study], more: Sequence[Mapping[str, Any]] = ()) -> str:
    """What the page says of itself, and of runs that added to it."""
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
    if cached and not more:
        parts.append(f"{cached} of the {runs} runs came from the cache.")
    for run in more:
        parts.append(
            f"The rows of {', '.join(run['methods'])} were added by `{run['command']}`, whose "
            "AdamW has the same losses. Their times are AdamW's of this record, times their ratio "
            "to AdamW's in that run, beside other work on the machine: they are uncertain by a "
            "fifth, and ratios below 1 are noise."
        )
    return "\n\n".join(parts)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = _record.arguments(__doc__, tuple(TASKS))
    add = parser.add_argument
    help = "compared besides AdamW, separated by commas"
    add("--methods", type=_record.names(NAMES), default=NAMES, help=f"{help} ({', '.join(NAMES)})")
    add("--text", help="for lm, a UTF-8 file in the place of Python's documentation")
    add("--add", action="store_true", help="add the methods to the record in --out")
    for name in LM:
        add(f"--{name}", type=int, help="in the place of the preset's")
    return parser.parse_args()


def make_task(name: str, args: argparse.Namespace) -> Task:
    """A task at the preset's sizes, or the arguments'."""
    sizes = dict(PRESETS[args.preset][name])
    sizes |= {key: value for key in sizes if (value := getattr(args, key)) is not None}
    return TASKS[name](text=args.text, **sizes) if name == "lm" else TASKS[name](**sizes)


def main() -> None:
    """Trains what the arguments ask for and prints the comparison."""
    args = parse()
    tables, figures, settings, studies = [], {}, {}, []
    record = recorded(args) if args.add else {"settings": {}, "command": None}
    for name in args.only:
        task = make_task(name, args)
        known = methods_for(task)
        methods = {n: known[n] for n in NAMES if n in args.methods or n == ADAMW}
        before = record["settings"].get(name, {})
        study = Study(task, methods.values(), args.seed, before.get("grid", GRID)).run()
        found = study.find_all(methods)
        rows = {n: row_of(n, x, found[ADAMW]) for n, x in found.items()}
        rows = added(rows_in(record, task), rows) if args.add else rows
        image = f"train_{name}.png" if figures else "train.png"
        tables += tables_of(study, rows, image)
        figures[name] = draw(task, rows)
        settings[name] = {**study.settings(), **before}
        studies.append(study)
    more = record["settings"].get("added", [])
    if args.add:
        names = [name for name in args.methods if name != ADAMW]
        more = [*more, {"methods": names, "command": _record.command_of("train")}]
        settings["added"] = more
    figure = figures.pop(args.only[0])
    title = "Training with tuned optimizers"
    page = about(studies, more)
    command = record["command"]
    _record.write(args, "train", title, page, tables, figure, settings, figures, command=command)


if __name__ == "__main__":
    main()
