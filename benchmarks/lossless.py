"""What storages of fewer bits cost in loss: bytes against validation loss, seed by seed.

    python -m benchmarks lossless                       # goes on where the record ends: hours
    python -m benchmarks lossless --minutes 60          # starts no run after an hour
    python -m benchmarks lossless --minutes 0           # the page of what is recorded
    python -m benchmarks lossless --only lm --methods soap,shampoo --seeds 1,2,3

Every run is a line of `lossless.jsonl` in `--out`; runs that have a line are not repeated, so that
a record may grow over many starts. Delete the lines of code that has changed.

Runs have the learning rates at which `train` found float32 best, from `train.json`, and nothing is
tuned for a storage. `wide` is `lm` with a model of width 128, at the rates of `lm`: most of its
factors are larger than a tile of codes.

The row *float32, other rounding* scales every update by 1 + 1e-6, which means nothing: what it
differs by is what a run differs by if anything at all is rounded in another way.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _record, _tasks
from ._curves import spread
from ._optimizers import methods_for
from ._tasks import Task
from ._training import Method, Program
from ._tuning import finite

SEEDS = (1, 2, 3, 4, 5)
ADAMW = "optax.adamw"
TASKS: dict[str, Callable[[], Task]] = {
    "lm": _tasks.lm,
    "digits": _tasks.digits,
    "wide": lambda: _tasks.lm(width=128),
}
TITLES = {
    "lm": "A small language model",
    "digits": "Handwritten digits",
    "wide": "A language model of width 128",
}
RATES_OF = {"wide": "lm"}

FLOAT = "float32"
ROUNDED = "float32, other rounding"
HALF = "momentum in bfloat16"
# Each step of this order is what one would like to know next.
STORAGES: dict[str, Any] = {
    "packed, 8 bits": curvax.packed(),
    "VQ": curvax.quantized(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "packed, 6 bits": curvax.packed(6),
    "CQ": curvax.cholesky(),
    "packed, 4 bits": curvax.packed(4),
    "packed, bases in squares": curvax.packed(bases=curvax.quantized(8)),
    "packed, bases in bfloat16": curvax.packed(bases=curvax.dense(jnp.bfloat16)),
}
MOMENTS: dict[str, Mapping[str, Any]] = {
    "8 bits": {"bits": 8},
    "8 bits, dither": {"bits": 8, "dither": True},
    "8 bits, tiles of 16": {"bits": 8, "block": 16},
    "4 bits": {"bits": 4},
    "4 bits, dither": {"bits": 4, "dither": True},
}
FACTORS = ("soap", "shampoo", "asgo", "foam", "eigen_adam")
WITHOUT_FACTORS = ("muon", "alice", "sumo", "galore")
METHODS = (*FACTORS, *WITHOUT_FACTORS)
BASES = ("soap", "eigen_adam")
HALVES = ("muon",)  # with an argument for the momentum's dtype and no other state
SMALLEST_MOMENT = 1024
NEAR = 0.005  # aimed at, between the mean losses of a storage and of float32

COLUMNS = {
    "method": ("method", ""),
    "form": ("storage", ""),
    "bytes": ("bytes of state per parameter", ".2f"),
    "share": ("over float32's", ".3f"),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond float32's, seed by seed", ""),
    "seeds": ("seeds", "d"),
    "aim": ("mean beyond float32's", ""),
}


def forms_of(name: str) -> tuple[str, ...]:
    """How a method is stored."""
    if name == ADAMW:
        return (FLOAT,)
    half = (HALF,) if name in HALVES else ()
    if name in WITHOUT_FACTORS:
        return (FLOAT, ROUNDED, *MOMENTS, *half)
    kept = [form for form in STORAGES if name in BASES or "bases" not in form]
    return (FLOAT, ROUNDED, *kept)


def in_codes(make: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A method whose matrices' moments and bases are in codes between steps."""

    def where(place: str, leaf: Any) -> bool:
        return place.startswith("inner_states/matrices") and leaf.size >= SMALLEST_MOMENT

    def made(rate: Any, **options: Any) -> optax.GradientTransformation:
        return curvax.quantize_state(make(rate, **options), where=where, **settings)

    made.__name__ = make.__name__
    return made


def rounded(make: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose updates are rounded in another way."""

    def made(rate: Any, **options: Any) -> optax.GradientTransformation:
        return optax.chain(make(rate, **options), optax.scale(1 + 1e-6))

    made.__name__ = make.__name__
    return made


def method_of(name: str, form: str, task: Task) -> Method:
    """A method of `train`, stored in this form."""
    plain = methods_for(task)[name]
    if form in STORAGES:
        return Method(plain.make, {**plain.options, "storage": STORAGES[form]})
    if form in MOMENTS:
        return Method(in_codes(plain.make, **MOMENTS[form]), plain.options)
    if form == HALF:
        return Method(plain.make, {**plain.options, "dtype": jnp.bfloat16})
    return Method(rounded(plain.make), plain.options) if form == ROUNDED else plain


@functools.cache
def tuned_rates(task: str) -> dict[str, float]:
    """The learning rate of each method, and AdamW's, as `train` found them."""
    tables = json.loads((_record.FOLDER / "train.json").read_text())["tables"]
    title = TITLES[RATES_OF.get(task, task)]
    rows = next(table["rows"] for table in tables if table["title"] == title)
    return {row["method"]: row["rate"] for row in rows}


# The record.


def read(path: Path) -> list[dict[str, Any]]:
    """The runs that are recorded."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a run from others."""
    return tuple(run[key] for key in ("task", "method", "form", "seed"))


def cells(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Methods and forms, the first form of all methods before the second of any."""
    columns = [[(name, form) for form in forms_of(name)] for name in (ADAMW, *names)]
    for row in itertools.zip_longest(*columns):
        yield from filter(None, row)


def missing(
    tasks: tuple[str, ...], names: tuple[str, ...], seeds: tuple[int, ...], path: Path
) -> list[tuple[str, str, str, list[int]]]:
    """The programs to run and their seeds."""
    there = {key_of(run) for run in read(path)}
    wanted = [
        (task, *cell, [seed for seed in seeds if (task, *cell, seed) not in there])
        for task in tasks
        for cell in cells(names)
    ]
    return [program for program in wanted if program[-1]]


def run_all(programs: list[tuple[str, str, str, list[int]]], path: Path, until: float) -> None:
    """Runs what is missing, until it is too late to start another."""
    tasks: dict[str, Task] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, method, form, seeds in tqdm(programs, unit="program", file=sys.stderr):
        if time.monotonic() >= until:
            break
        task = tasks.setdefault(name, tasks[name] if name in tasks else TASKS[name]())
        how = functools.partial(method_of(method, form, task).optimizer, task)
        program = Program(how, task)
        rates = tuned_rates(name)
        values = {"rate": rates[method], "adam_rate": rates[ADAMW]}
        for seed in seeds:
            if time.monotonic() >= until:
                break
            *_, run = program.train(values, seed, last=True)
            line = {
                "task": name,
                "method": method,
                "form": form,
                "seed": seed,
                "loss": finite(run.loss),
                "rate": rates[method],
                "state_bytes": program.state_bytes(values),
                "parameters": sum(x.size for x in jax.tree.leaves(program.like)),
                "compile_seconds": round(run.compile_seconds, 2),
                "ms": round(1e3 * sum(run.seconds) / task.steps, 2),
                "sizes": dict(task.sizes),
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


# The page.


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every method and form of one task, beside float32 of the same seeds."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["method"], run["form"]), {})[run["seed"]] = run
    order = list(cells(METHODS))
    rows = []
    for method, form in sorted(found, key=lambda cell: (cell[0], order.index(cell))):
        own, plain = found[method, form], found.get((method, FLOAT), {})
        losses = {seed: _number(run["loss"]) for seed, run in sorted(own.items())}
        both = [seed for seed in losses if seed in plain]
        beyond = [losses[seed] - _number(plain[seed]["loss"]) for seed in both]
        first = next(iter(own.values()))
        row: dict[str, Any] = {
            "method": method,
            "form": form,
            "bytes": first["state_bytes"] / first["parameters"],
            "loss": spread(losses.values(), ".3f"),
            "seeds": len(losses),
            "by_seed": {seed: finite(loss) for seed, loss in losses.items()},
        }
        if both:
            row["share"] = first["state_bytes"] / plain[both[0]]["state_bytes"]
        if both and form != FLOAT:
            mean = float(np.mean(beyond))
            row |= {"mean": finite(mean), "beyond": ", ".join(f"{x:+.3f}" for x in beyond)}
            row["aim"] = f"{mean:+.4f}" + ("" if mean <= NEAR else f", **above {NEAR:g}**")
        rows.append(row)
    return rows


def _number(loss: float | None) -> float:
    return float("inf") if loss is None else loss


def draw(tables: list[_record.Table]) -> Figure:
    """Bytes of the state against loss, both beside float32's."""
    figure = Figure(figsize=(1 + 5 * len(tables), 4.8), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    markers = dict(zip((*STORAGES, *MOMENTS, HALF, ROUNDED), "os^vDP*Xos<^vh.", strict=False))
    for axis, table in zip(panels, tables, strict=True):
        for row in table.rows:
            if row.get("mean") is None:
                continue
            color = _record.COLORS[METHODS.index(row["method"]) % len(_record.COLORS)]
            style = {"color": color, "marker": markers[row["form"]], "ls": ""}
            if row["method"] in WITHOUT_FACTORS:
                style["markerfacecolor"] = "none"
            axis.plot(row["share"], row["mean"], **style)
        axis.axhline(0, color="gray", lw=0.8)
        axis.axhline(NEAR, color="gray", lw=0.8, ls=":")
        axis.set(title=table.title, xlabel="bytes of the state, over float32's")
        axis.set_yscale("symlog", linthresh=0.02)
        axis.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss beyond float32's, mean of the seeds")
    for i, name in enumerate(METHODS):
        hollow = {"markerfacecolor": "none"} if name in WITHOUT_FACTORS else {}
        color = _record.COLORS[i % len(_record.COLORS)]
        panels[0].plot([], [], "o", color=color, label=name, **hollow)
    for form, marker in markers.items():
        hollow = {"markerfacecolor": "none"} if form in (*MOMENTS, HALF) else {}
        panels[0].plot([], [], marker, color="gray", label=form, **hollow)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    return figure


def main() -> None:
    """Runs what the record lacks and prints the tables."""
    parser = _record.arguments(__doc__, tuple(TASKS))
    add = parser.add_argument
    add("--methods", type=_record.names(METHODS), default=METHODS, help="separated by commas")
    add("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=SEEDS)
    add("--minutes", type=float, default=float("inf"), help="start no run after so many")
    args = parser.parse_args()
    path = args.out / "lossless.jsonl"
    programs = missing(args.only, args.methods, args.seeds, path)
    run_all(programs, path, time.monotonic() + 60 * args.minutes)
    left = sum(len(p[-1]) for p in missing(args.only, args.methods, args.seeds, path))
    runs = read(path)
    tables = [
        _record.Table(TITLES[name], COLUMNS, rows_of([r for r in runs if r["task"] == name]))
        for name in TASKS
        if any(run["task"] == name for run in runs)
    ]
    about = (
        "Every storage at the learning rate that `train` found for float32; *wide* at that of the "
        "small language model. *Bytes* are those of the whole optimizer's state. The moments and "
        "bases of Muon, Alice, SUMO and GaLore are in codes by `quantize_state`, those of AdamW "
        "for the other parameters in float32. *Other rounding* is float32 with every update scaled "
        "by 1 + 1e-6: what any rounding does to a run. "
        f"{len(runs)} runs; {left} are not done yet.\n\n"
        "![bytes against loss](lossless.png)"
    )
    settings = {"seeds": args.seeds, "runs": len(runs), "left": left}
    title = "What storages of fewer bits cost in loss"
    _record.write(args, "lossless", title, about, tables, draw(tables), settings)


if __name__ == "__main__":
    main()
