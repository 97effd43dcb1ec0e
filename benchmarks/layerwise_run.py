"""Layer-wise and ordinary steps that run: peak memory, the curve of the loss, the time of a step.

    python -m benchmarks layerwise_run                         # minutes, and 12 GiB of memory
    python -m benchmarks layerwise_run --size 350M             # 4 GiB
    python -m benchmarks layerwise_run --only curve,time       # a minute

RACS for the layers, AdamW for embedding and head. Peaks are those of LLaMA in bfloat16, with a
process for each step: the most memory that it had resident, compiler and Python included.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _lines, _record
from ._llama import HEAD, SIZES, STEPS, Model, drawn, parameters
from ._programs import whole_bytes
from ._timing import Program, take_turns
from ._training_step import corpus_for
from ._trees import Shapes

GIB, SUITE = 2**30, "layerwise_run"
RATES = {"layers": 1e-2, "ends": 3e-3}
KERNELS: dict[str, Any] = {
    "weight_dimension_numbers": {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
}
PEAKS = {
    "size": ("model", ""),
    "step": ("step", ""),
    "start": ("before the first step, resident", ".2f"),
    "peak": ("at most", ".2f"),
    "whole": ("what XLA reserves", ".2f"),
    "losses": ("losses", ""),
}
CURVES = {
    "dtype": ("weights", ""),
    "ordinary": ("loss at the end, ordinary", ".5f"),
    "layerwise": ("layer-wise", ".5f"),
    "apart": ("largest difference of all steps", ".1e"),
}
TIMES = {
    "model": ("model", ""),
    "dtype": ("weights", ""),
    "ordinary": ("ordinary, ms", ".1f"),
    "layerwise": ("layer-wise, ms", ".1f"),
    "ratio": ("layer-wise over ordinary, median of pairs", ".3f"),
    "verdict": ("aim", ""),
}


class Cell(NamedTuple):
    """A few steps of a model."""

    size: str
    step: str
    steps: int
    tokens: int


def optimizers() -> dict[str, Any]:
    """For each part of the model."""
    ends = optax.adamw(RATES["ends"])
    return {"embed": ends, "layers": curvax.racs(RATES["layers"], **KERNELS), "head": ends}


def start(model: Shapes, dtype: Any, seed: int) -> tuple[Any, Any]:
    """Parameters and states."""

    params = drawn(parameters(model, dtype), seed)
    return params, {name: jax.jit(o.init)(params[name]) for name, o in optimizers().items()}


def measured(cell: Cell) -> dict[str, Any]:
    """Runs the steps of a cell."""
    model, run = SIZES[cell.size], functools.partial(STEPS[cell.step], Model(), optimizers())
    own = jax.block_until_ready(start(model, jnp.bfloat16, 0))
    tokens = jax.random.randint(jax.random.key(1), (cell.tokens + 1,), 0, model.vocabulary)
    given = tokens[:-1], tokens[1:]
    step: Any = jax.jit(run, donate_argnums=(0, 1)).lower(*own, *given).compile()
    row: dict[str, Any] = {"start": resident(), "whole": whole_bytes(step) / GIB}
    row |= {"losses": [], "times": []}
    for _ in tqdm(range(cell.steps), desc=f"{cell.size}, {cell.step}", file=sys.stderr):
        begin = time.perf_counter()
        *own, loss = step(*own, *given)
        row["losses"].append(float(loss))
        row["times"].append(round(time.perf_counter() - begin, 1))
    return row | {"peak": resident()}


def resident() -> float:
    """The most memory that this process had so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def curves(args: Any, dtype: Any) -> dict[str, list[float]]:
    """Losses of a small model on text, by step."""
    corpus = corpus_for(args.tokens)
    model, own = Shapes(2 * HEAD, 6 * HEAD, 4, corpus.symbols), {}
    for name, step in STEPS.items():
        run = jax.jit(functools.partial(step, Model(), optimizers()), donate_argnums=(0, 1))
        state, places, losses = start(model, dtype, args.seed), np.random.default_rng(args.seed), []
        for _ in tqdm(range(args.curve_steps), desc=name, file=sys.stderr):
            place = places.integers(len(corpus.train) - args.tokens - 1)
            tokens = corpus.train[place : place + args.tokens + 1]
            *state, loss = run(*state, tokens[:-1], tokens[1:])
            losses.append(float(loss))
        own[name] = losses
    return own


def times(args: Any, dtype: Any) -> dict[str, Any]:
    """Milliseconds of both steps of a model, which take turns."""
    model = Shapes(args.width, 11 * args.width // 4, 8, 16 * args.width)
    tokens = jax.random.randint(jax.random.key(1), (4 * args.tokens + 1,), 0, model.vocabulary)

    def program(step: Any) -> Program:
        def run(state: Any, *given: Any) -> Any:
            *new, loss = step(Model(), optimizers(), *state, *given)
            return new, loss

        return Program(run, list(start(model, dtype, 0)), tokens[:-1], tokens[1:])

    programs = {name: program(step) for name, step in STEPS.items()}
    take_turns(programs, args.rounds, "steps")
    one, other = (np.array(programs[name].times[1:]) for name in ("layerwise", "ordinary"))
    ratio = float(np.median(one / other))
    return {
        "model": str(model),
        "ratio": ratio,
        "verdict": _record.verdict(ratio, 1.05),
        **{name: x.median for name, x in programs.items()},
    }


def draw(peaks: list[dict[str, Any]], found: dict[str, Any]) -> Figure:
    """Peaks as bars, and the losses of both steps."""
    figure = Figure(figsize=(8.8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = [f"{row['size']}, {row['step']}" for row in peaks]
    left.barh(labels, [row["peak"] for row in peaks], color=_record.VERMILION, label="at most")
    left.barh(labels, [row["start"] for row in peaks], color=_record.BLUE, label="at the start")
    left.set(xlabel="resident memory, GiB")
    left.invert_yaxis()
    if peaks:
        left.legend(frameon=False, fontsize="small")
    for dtype, color in zip(found, _record.COLORS, strict=False):
        for name, form, width in (("ordinary", "-", 3), ("layerwise", "--", 1)):
            label, losses = f"{dtype}, {name}", found[dtype][name]
            right.plot(losses, form, color=color, lw=width, alpha=0.6, label=label)
    right.set(xlabel="step", ylabel="training loss")
    right.grid(alpha=0.3)
    if found:
        right.legend(frameon=False, fontsize="small")
    return figure


def main() -> None:
    """Runs what is missing, and prints the tables."""
    parser = _record.arguments(__doc__, ("peak", "curve", "time"))
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), default="1.3B", help="whose peak (%(default)s)")
    add("--steps", type=int, default=3, help="of the large model (%(default)s)")
    add("--tokens", type=int, default=64, help="in a step (%(default)s)")
    add("--curve-steps", type=int, default=200, help="of the small model (%(default)s)")
    add("--width", type=int, default=256, help="of the model whose step is timed (%(default)s)")
    add("--rounds", type=int, default=15, help="of both steps (%(default)s)")
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    tables, dtypes, peaks = [], ("float32", "bfloat16"), []
    if "peak" in args.only:
        cells = [Cell(args.size, step, args.steps, args.tokens) for step in STEPS]
        lines = _lines.extended(args, SUITE, SUITE, cells, kind=Cell)
        peaks = [{**cell._asdict(), **line} for cell, line in lines.items()]
        shown = [row | {"losses": listed(row["losses"])} for row in peaks]
        note = (
            "GiB. A process for each step, which draws the weights, compiles, and repeats the step "
            f"with the same {args.tokens} tokens."
        )
        tables.append(_record.Table("Memory of a process", PEAKS, shown, note))
    found = {dtype: curves(args, jnp.dtype(dtype)) for dtype in dtypes if "curve" in args.only}
    if found:
        rows = [
            {
                "dtype": dtype,
                **{name: float(np.mean(x[-10:])) for name, x in losses.items()},
                "apart": float(np.ptp(list(losses.values()), axis=0).max()),
                "all": losses,
            }
            for dtype, losses in found.items()
        ]
        note = (
            f"A LLaMA with 4 layers of width {2 * HEAD} on the text of `examples/train_lm.py`, "
            f"{args.curve_steps} steps of {args.tokens} characters. The loss at the end is the "
            "mean of ten steps."
        )
        tables.append(_record.Table("The same curve", CURVES, rows, note))
    if "time" in args.only:
        rows = [{"dtype": dtype} | times(args, jnp.dtype(dtype)) for dtype in dtypes]
        note = f"{args.rounds} steps of each, which take turns, of {4 * args.tokens} tokens."
        tables.append(_record.Table("The time of a step", TIMES, rows, note))
    about = (
        "LLaMA with RACS for its layers and AdamW for embedding and head: an ordinary step with "
        "`jax.checkpoint` around each layer, and one whose layers are updated during the backward "
        "pass (`curvax.layerwise`)."
    )
    settings = {"rates": RATES, "tokens": args.tokens}
    title = "Layer-wise steps that run"
    _record.write(args, SUITE, title, about, tables, draw(peaks, found), settings)


def listed(losses: list[float]) -> str:
    """One after the other."""
    return ", ".join(f"{x:.4f}" for x in losses)


if __name__ == "__main__":
    main()
