"""Milliseconds of every method's update, between refreshes and at them, beside its peers.

    python -m benchmarks step                                # all methods, on both trees
    python -m benchmarks step --methods muon,racs --only gpt2

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
from typing import Any

from tqdm import tqdm

from . import _floors, _record
from ._methods import METHODS, NAMES, Method, chosen
from ._timing import Program, compile_all, percentile, ratio, take_turns, update_of
from ._trees import GPT2_SMALL, LLAMA_130M, Shapes, kernels

MODELS = {"gpt2": GPT2_SMALL, "llama": LLAMA_130M}
TITLES = {"gpt2": "GPT-2-small's kernels", "llama": "LLaMA-130M's kernels"}
# Width, layers, rank, rounds.
PRESETS = {"cpu": (256, 2, 64, 60), "gpu": (768, 12, 256, 200)}
PERIOD = 10

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
    """The aim of a ratio."""
    return None if value is None or bound is None else _record.verdict(value, bound)


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, tuple(MODELS))
    add = parser.add_argument
    known = _record.names(tuple(METHODS))
    add("--methods", type=known, default=NAMES, help="separated by commas")
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
        methods = chosen(args.methods, variants=section == "gpt2" and not args.plain)
        model = MODELS[section].scaled(settings["width"], settings["layers"])
        rows = measure(model, rank, rounds, args.seconds, methods, args.seed)
        tables.append(_record.Table(TITLES[section], COLUMNS, rows, f"{model}; rank {rank}."))
    _record.write(
        args,
        "step",
        "Time of a step",
        about(),
        tables,
        settings | {"seconds": args.seconds},
    )


def about() -> str:
    """The note of the page."""
    return (
        "An optimizer's update of the kernels alone, with donated state. The programs of a table "
        "take turns, in another order every round. *Its products*: only the matrix products (and "
        "per-step decompositions) that the method needs between refreshes. *Refresh*: a step that "
        f"refreshes everything, once in {PERIOD} steps. Aims are for steps between refreshes. With "
        "fewer than a hundred steps the p99 is about the maximum."
    )


if __name__ == "__main__":
    main()
