"""Milliseconds of every method's update, between refreshes and at them, beside its peers.

    python -m benchmarks step                                # all methods, on both trees
    python -m benchmarks step --methods muon,racs --only gpt2
    python -m benchmarks step --only stacking                # from which size on stacking costs
    python -m benchmarks step --only unstacked               # what stacks cost every method

The trees are the kernels of attention and MLP of GPT-2-small and of LLaMA-130M, at a third of the
width and with two layers on a CPU; embeddings, norms and biases are left out, because all methods
give them to AdamW (ASGO and DASGO apart). Gradients are Gaussian and stay the same. Storages and
other variants are on the first tree alone.

States are donated and the programs of a table take turns, in another order every round. A method's
products are those it cannot do without between refreshes (`_floors.py`), compiled for the same
tree. Every method refreshes all that it has once in ten steps, FOAM and DR-Shampoo too, whose
threshold no factor meets here. Step 1 is not counted. A program that has used up its seconds stops,
so the slowest have fewer steps; of less than a hundred the 99th percentile is about the largest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from tqdm import tqdm

import curvax

from . import _floors, _record
from ._methods import FAMILIES, Method, chosen, with_settings
from ._timing import Program, compile_all, percentile, ratio, take_turns, update_of
from ._trees import GPT2_SMALL, LLAMA_130M, Shapes, kernels

SECTIONS = ("gpt2", "llama", "stacking", "unstacked")
MODELS = {"gpt2": GPT2_SMALL, "llama": LLAMA_130M}
TITLES = {"gpt2": "GPT-2-small's kernels", "llama": "LLaMA-130M's kernels"}
# Width, layers, rank, rounds.
PRESETS = {"cpu": (256, 2, 64, 60), "gpu": (768, 12, 256, 200)}
PERIOD = 10
SIZES = (32, 64, 96, 128, 192, 256, 384)

COLUMNS = {
    "method": ("method", ""),
    "p50": ("p50, ms", ".2f"),
    "p99": ("p99, ms", ".2f"),
    "steps": ("steps", "d"),
    "products": ("its products, ms", ".2f"),
    "over_products": ("over them", ".2f"),
    "aim": ("aim", ""),
    "over_adamw": ("over AdamW", ".2f"),
    "peer": ("peer", ""),
    "over_peer": ("over it", ".2f"),
    "peer_aim": ("aim", ""),
    "refresh_p50": ("refresh, p50, ms", ".2f"),
    "refresh_p99": ("p99, ms", ".2f"),
    "refreshes": ("refreshes", "d"),
    "temporaries": ("temporaries, MB", ".1f"),
}
STACKING = {
    "size": ("size", "d"),
    "stacked": ("stacked, ms", ".2f"),
    "single": ("one by one, ms", ".2f"),
    "ratio": ("ratio", ".2f"),
    "stacked_compile": ("stacked, compile, s", ".2f"),
    "single_compile": ("one by one, compile, s", ".2f"),
}


UNSTACKED = {
    "method": ("method", ""),
    "stacked": ("stacked, ms", ".2f"),
    "single": ("one by one, ms", ".2f"),
    "ratio": ("ratio", ".2f"),
    "stacked_temporaries": ("stacked, temporaries, MB", ".1f"),
    "single_temporaries": ("one by one, temporaries, MB", ".1f"),
}


def split(times: list[float], method: Method, period: int) -> tuple[list[float], list[float]]:
    """The times between refreshes and at them, without step 1."""
    still, at = [], []
    for step, time in enumerate(times[1:], 2):
        due = method.refreshes and step % period == method.offset
        (at if due else still).append(time)
    return still, at


def measure(
    model: Shapes,
    rank: int,
    rounds: int,
    seconds: float,
    methods: dict[str, Method],
    seed: int,
    period: int = PERIOD,
) -> list[dict[str, Any]]:
    """The rows of one tree's table."""
    grads = kernels(model, seed)
    floors = {name: m.floor(rank) for name, m in methods.items() if m.floor is not None}
    programs: dict[Any, Program] = {}
    for name, method in tqdm(methods.items(), desc="trace", file=sys.stderr):
        programs[name] = update_of(method.make(period, rank), grads)
    # Floors are equal where methods have the same products.
    programs |= {floor: _floors.program(floor, grads) for floor in set(floors.values())}
    compile_all(programs)
    take_turns(programs, rounds, str(model), seconds)
    found = {}
    for name, method in methods.items():
        still, at = split(programs[name].times, method, period)
        found[name] = {"p50": percentile(still, 50), "p99": percentile(still, 99)}
        found[name] |= {"steps": len(still), "refreshes": len(at) or None}
        found[name] |= {"refresh_p50": percentile(at, 50), "refresh_p99": percentile(at, 99)}
        found[name]["temporaries"] = programs[name].temporaries / 1e6
    rows = []
    for name, method in methods.items():
        p50 = found[name]["p50"]
        row = {"method": name, **found[name], "peer": method.peer}
        row["over_adamw"] = ratio(p50, found["optax.adamw"]["p50"])
        if name in floors:
            row["products"] = programs[floors[name]].median
            row["over_products"] = ratio(p50, row["products"])
        if method.peer is not None:
            row["over_peer"] = ratio(p50, found[method.peer]["p50"])
        row["aim"] = aim(row.get("over_products"), method.aim)
        row["peer_aim"] = aim(row.get("over_peer"), method.peer_aim)
        rows.append(row)
    return rows


def aim(value: float | None, bound: float | None) -> str | None:
    """What a ratio is held to."""
    return None if value is None or bound is None else _record.verdict(value, bound)


def stacking(rounds: int, count: int = 24) -> list[dict[str, Any]]:
    """Muon's step on square matrices of one size: one stack against one by one."""
    rows = []
    for size in SIZES:
        params = {f"w{i:02d}": jnp.eye(size) + i for i in range(count)}
        programs = {
            s: update_of(curvax.muon(0.02, matrices=curvax.MatrixRule(stack=s)), params)
            for s in (True, False)
        }
        take_turns(programs, rounds, f"{size}×{size}")
        stacked, single = programs[True], programs[False]
        rows.append(
            {
                "size": size,
                "stacked": stacked.median,
                "single": single.median,
                "ratio": stacked.median / single.median,
                "stacked_compile": stacked.compile_seconds,
                "single_compile": single.compile_seconds,
            }
        )
    return rows


def unstacked(
    model: Shapes, rank: int, rounds: int, seconds: float, families: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """Every method's step between refreshes: in stacks against one by one."""
    grads = kernels(model, seed)
    methods = {
        (name, s): with_settings(name, matrices=curvax.MatrixRule(stack=s))
        for name in families
        for s in (True, False)
    }
    programs: dict[Any, Program] = {}
    for key, method in tqdm(methods.items(), desc="trace", file=sys.stderr):
        programs[key] = update_of(method.make(PERIOD, rank), grads)
    compile_all(programs)
    take_turns(programs, rounds, str(model), seconds)

    def median(key: Any) -> float | None:
        return percentile(split(programs[key].times, methods[key], PERIOD)[0], 50)

    rows = []
    for name in families:
        stacked, single = median((name, True)), median((name, False))
        row = {"method": name, "stacked": stacked, "single": single}
        row |= {"ratio": ratio(stacked, single)}
        row |= {"stacked_temporaries": programs[name, True].temporaries / 1e6}
        rows.append(row | {"single_temporaries": programs[name, False].temporaries / 1e6})
    return rows


def draw(tables: list[_record.Table]) -> Figure:
    """Median and 99th percentile of every method, on one scale; its products beside it."""
    figure = Figure(figsize=(5.5 * len(tables), 0.22 * max(len(t.rows) for t in tables) + 1.6))
    figure.set_layout_engine("constrained")
    handles: Any = None
    for axis, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        rows = table.rows
        if "size" in rows[0]:
            sizes = [row["size"] for row in rows]
            for key, color in (("stacked", _record.BLUE), ("single", _record.VERMILION)):
                axis.plot(sizes, [row[key] for row in rows], "o-", color=color, label=key)
            axis.set(xlabel="order of 24 matrices", ylabel="ms", yscale="log", title=table.title)
            axis.legend(frameon=False)
            continue
        y = np.arange(len(rows))
        marks = {
            "products": ("|", _record.BLACK, "its products alone"),
            "p50": ("o", _record.BLUE, "between refreshes"),
            "p99": (".", _record.SKY, "the same, p99"),
            "refresh_p50": ("D", _record.VERMILION, "at a refresh"),
        }
        if "single" in rows[0]:
            marks = {
                "single": ("o", _record.BLUE, "one by one"),
                "stacked": ("D", _record.VERMILION, "in stacks"),
            }
        for key, (marker, color, label) in marks.items():
            x = [np.nan if row.get(key) is None else row[key] for row in rows]
            size = 10 if marker == "|" else 5
            axis.plot(x, y, marker, color=color, markersize=size, label=label, mew=1.5)
        axis.set_yticks(y, [row["method"] for row in rows], fontsize=8)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set(xscale="log", xlabel="ms per update", title=table.title)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        if "single" in rows[0]:
            axis.legend(frameon=False, fontsize=8)
        else:
            handles = axis.get_legend_handles_labels()
    if handles:
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    add = parser.add_argument
    add("--methods", type=_record.names(FAMILIES), default=FAMILIES, help="separated by commas")
    add("--plain", action="store_true", help="without storages and other variants")
    for name in ("width", "layers", "rank", "rounds"):
        add(f"--{name}", type=int, help="in place of the preset's")
    add("--seconds", type=float, default=20.0, help="of one program (%(default)s)")
    args = parser.parse_args()
    preset = zip(("width", "layers", "rank", "rounds"), PRESETS[args.preset], strict=True)
    settings = {name: getattr(args, name) or value for name, value in preset}
    rank, rounds = settings["rank"], settings["rounds"]
    tables = []
    for section in args.only:
        if section == "stacking":
            rows = stacking(rounds)
            tables.append(_record.Table("Muon on 24 matrices of one size", STACKING, rows))
            continue
        width, layers = settings["width"], settings["layers"]
        if section == "unstacked":
            model = GPT2_SMALL.scaled(width, layers)
            rows = unstacked(model, rank, rounds, args.seconds, args.methods, args.seed)
            title = "GPT-2-small's kernels, in stacks and one by one"
            tables.append(_record.Table(title, UNSTACKED, rows, f"{model}; rank {rank}."))
            continue
        methods = chosen(args.methods, variants=section == "gpt2" and not args.plain)
        model = MODELS[section].scaled(width, layers)
        rows = measure(model, rank, rounds, args.seconds, methods, args.seed)
        tables.append(_record.Table(TITLES[section], COLUMNS, rows, f"{model}; rank {rank}."))
    _record.write(
        args,
        "step",
        "Time of a step",
        about(),
        tables,
        draw(tables),
        settings | {"seconds": args.seconds},
    )


def about() -> str:
    """What the page says of itself."""
    return (
        "An optimizer's update of the kernels alone, with donated state. The programs of a table "
        "take turns, in another order every round. *Its products*: only the matrix products (and "
        "per-step decompositions) that the method needs between refreshes. *Refresh*: a step that "
        f"refreshes everything, once in {PERIOD} steps. Aims are for steps between refreshes. With "
        "fewer than a hundred steps the p99 is about the maximum."
    )


if __name__ == "__main__":
    main()
