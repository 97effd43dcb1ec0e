"""The time that optimizers add to a training step of the language model, at the papers' periods.

    python -m benchmarks overhead                        # about ten minutes
    python -m benchmarks overhead --methods racs,galore

The model, batch and schedule are those of `examples/train_lm.py`. A method runs once without its
periodic work, and for each kind of that once with it at every step; programs take turns. Its cost
is the first, and for every other its addition to the first over its period. The periods are those
of the papers: 200 for subspaces (GaLore, Alice; SUMO's is not said), 100 for the statistics and 500
for the roots of 4-bit Shampoo, 1 (GPT-2) and 15 (NanoGPT) for ASGO's root; 10 for SOAP is in common
use. Ranks are a quarter of the width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import optax

import curvax

from . import _record
from ._timing import Program, compile_all, take_turns
from ._training_step import Make, corpus_for, training_step

NEVER = curvax.every(10**6, offset=1)
PRESETS = {
    "cpu": {"width": 128, "depth": 4, "context": 64, "batch": 32},  # the example's
    "gpu": {"width": 768, "depth": 12, "context": 1024, "batch": 8},
}
ADAMW = "optax.adamw"

COLUMNS = {
    "method": ("method", ""),
    "ms": ("between, ms", ".1f"),
    "periodic": ("with periodic work, ms (its period)", ""),
    "mean": ("mean, ms", ".1f"),
    "over_adamw": ("over AdamW's", ".3f"),
    "aim": ("aim", ""),
}


class Method(NamedTuple):
    """An optimizer without its periodic work, and with each kind of it at every step."""

    between: Make
    periodic: tuple[tuple[int, Make], ...] = ()  # the period of each
    aim: float | None = None  # over AdamW


def refreshed(make: Any, period: int, aim: float | None = None, **settings: Any) -> Method:
    """A method with one kind of periodic work."""
    between = functools.partial(make, refresh=NEVER, **settings)
    return Method(between, ((period, functools.partial(make, refresh=1, **settings)),), aim)


def adamw_shampoo(rate: Any, *, weight_decay: float, **settings: Any) -> Any:
    """Shampoo in 4 bits on AdamW."""
    base = functools.partial(optax.adamw, weight_decay=weight_decay)
    storage = curvax.cholesky(error_feedback=0.95)
    return curvax.shampoo(rate, base=base, storage=storage, others=base(rate), **settings)


def racs_without_guard(rate: Any, *, weight_decay: float) -> Any:
    """RACS, whose gradients nothing checks."""
    others = optax.adamw(rate, weight_decay=weight_decay)
    how: Any = {"others": others, "weight_decay": weight_decay, "guard": False}
    how["matrices"] = curvax.MatrixRule(output_layer="auto")
    return curvax.assemble(curvax.scale_by_racs(), rate, **how)


def methods_for(width: int) -> dict[str, Method]:
    """The compared methods, for a model of this width."""
    rank = width // 4
    never = 10**6
    shampoo = functools.partial(adamw_shampoo, statistics_every=never, refresh=never)
    statistics = functools.partial(adamw_shampoo, statistics_every=1, refresh=never)
    roots = functools.partial(adamw_shampoo, statistics_every=never, refresh=1)
    return {
        ADAMW: Method(optax.adamw),
        "racs": Method(curvax.racs, aim=1.10),
        "racs, no guard": Method(racs_without_guard),
        "galore": refreshed(curvax.galore, 200, 1.10, rank=rank),
        "alice": refreshed(
            curvax.alice,
            200,
            1.10,
            rank=rank,
            switching=curvax.subspaces.complement(rank * 40 // 128),
        ),
        "sumo": refreshed(curvax.sumo, 200, 1.10, rank=rank),
        "shampoo, CQ+EF": Method(shampoo, ((100, statistics), (500, roots)), 1.15),
        "asgo": refreshed(curvax.asgo, 1, 1.15),
        "asgo, period 15": refreshed(curvax.asgo, 15, 1.15),
        "soap": refreshed(curvax.soap, 10),
    }


def row_of(name: str, method: Method, ms: dict[Any, float], adamw: float) -> dict[str, Any]:
    """A method's line, from the median of every program."""
    between = ms[name, 0]
    periodic = [(period, ms[name, i]) for i, (period, _) in enumerate(method.periodic, 1)]
    mean = between + sum((full - between) / period for period, full in periodic)
    return {
        "method": name,
        "ms": between,
        "periodic": ", ".join(f"{full:.1f} ({period})" for period, full in periodic),
        "periodic_ms": [full for _, full in periodic],
        "mean": mean,
        "over_adamw": mean / adamw,
        "bound": method.aim,
        "aim": None if method.aim is None else _record.verdict(mean / adamw, method.aim),
    }


def measure(
    names: tuple[str, ...], sizes: dict[str, int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """The lines of the table."""
    corpus = corpus_for(sizes["context"])
    known = methods_for(sizes["width"])
    chosen = {name: known[name] for name in known if name in names or name == ADAMW}
    programs: dict[Any, Program] = {}
    for name, method in chosen.items():
        for i, make in enumerate((method.between, *(m for _, m in method.periodic))):
            programs[name, i] = training_step(make, corpus, **sizes)
    compile_all(programs)
    take_turns(programs, rounds, "training steps", seconds)
    ms = {key: program.median for key, program in programs.items()}
    return [row_of(name, method, ms, ms[ADAMW, 0]) for name, method in chosen.items()]


def main() -> None:
    """Prints the table."""
    parser = _record.arguments(__doc__)
    names = tuple(name for name in methods_for(128) if name != ADAMW)
    add = parser.add_argument
    add("--methods", type=_record.names(names), default=names, help="separated by commas")
    add("--rounds", type=int, default=20, help="of every program (%(default)s)")
    add("--seconds", type=float, default=float("inf"), help="of one program (%(default)s)")
    for name in PRESETS["cpu"]:
        add(f"--{name}", type=int, help="in place of the preset's")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    sizes = {name: getattr(args, name) or value for name, value in preset.items()}
    rows = measure(args.methods, sizes, args.rounds, args.seconds)
    about = (
        "A whole training step of the language model of `examples/train_lm.py`. *Between*: without "
        "the method's periodic work. *With periodic work*: with one kind of it at every step. "
        "*Mean* over a period: *between*, plus what each kind of periodic work adds, divided by "
        "its period."
    )
    table = _record.Table("Training step", COLUMNS, rows)
    settings = {"rounds": args.rounds, **sizes}
    title = "What optimizers add to a training step"
    _record.write(args, "overhead", title, about, [table], settings)


if __name__ == "__main__":
    main()
