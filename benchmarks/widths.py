"""Best learning rates over the width of a model, with and without what keeps them.

    OPENBLAS_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false
    intra_op_parallelism_threads=1" python -m benchmarks widths   # about an hour of one core
    python -m benchmarks widths --status

A GPT with one layer and heads of 16, whose kernels start with a standard deviation of 1/√inputs,
trains at each width with matrices at several learning rates, a factor of 2 apart: from the best one
of the width before, in its direction, until both neighbors of the best one are worse. The rate that
is best at the smallest width runs at the others too, so that the table says what it costs there.
All other parameters have AdamW, whose rate falls as 1/width. A run is a line of `widths.jsonl`;
the command may be killed, and goes on where it was.

Without: AdamW's usual decay times the learning rate, and directions as long as Adam's. With: a
decay per step of a constant over the width, whatever the rate, and directions whose spectral norm
is √max(1, outputs/inputs); or weights on spheres.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from tqdm import tqdm

import curvax

from . import _lines, _record
from ._training import Program, Task
from .evidence._language import language
from .evidence._methods import CLIP, schedule_of

WIDTHS = (64, 128, 256, 512)
SIZES = {"batch": 8, "context": 64, "depth": 1, "evaluations": 1}
STEPS = 150
HEAD = 16
OTHERS = 0.5  # of AdamW for other parameters: over the width
DECAY, PER_STEP = 0.1, 0.04  # times the rate; over the width
LINES = _record.FOLDER / "widths.jsonl"


class Arm(NamedTuple):
    """A method with or without what keeps its rate over widths."""

    method: str
    kept: str  # what keeps it; empty without
    start: float  # the first rate at the smallest width
    direction: Callable[[], optax.GradientTransformation]


adam = functools.partial(optax.scale_by_adam, 0.9, 0.99)
soap = functools.partial(curvax.scale_by_soap, refresh=10)  # at the first and at every tenth step


def muon(consistent_rms: float | None = None) -> optax.GradientTransformation:
    """Muon's at one of its two lengths."""
    return optax.chain(curvax.scale_by_muon(), curvax.scale_by_shape(consistent_rms))


def spectral(direction: Callable[[], Any]) -> optax.GradientTransformation:
    """A direction with the spectral norm of Muon's."""
    of_norm_1 = curvax.normalize_matrices(1.0, norm="spectral")
    return optax.chain(direction(), of_norm_1, curvax.scale_by_shape())


SPECTRAL, HYPERBALL = "spectral norm, decay over width", "hyperball"
ARMS = (
    Arm("adamw", "", 0.001, adam),
    Arm("adamw", SPECTRAL, 0.032, functools.partial(spectral, adam)),
    Arm("soap", "", 0.002, soap),
    Arm("soap", SPECTRAL, 0.032, functools.partial(spectral, soap)),
    Arm("muon", "", 0.016, functools.partial(muon, 0.2)),
    Arm("muon", SPECTRAL, 0.032, muon),
    Arm("muon", HYPERBALL, 0.064, muon),
)


def optimizer(arm: Arm, width: int, values: Mapping[str, Any]) -> optax.GradientTransformation:
    """An arm at a rate, with the schedule and the clipping of the evidence."""
    schedule = schedule_of(STEPS)
    side: Any = {"weight_decay": DECAY}
    if arm.kept == SPECTRAL:
        side = {"weights": curvax.weights.decay(PER_STEP / width, independent=True)}
    elif arm.kept == HYPERBALL:
        side = {"weights": "hyperball"}
    made = curvax.assemble(
        arm.direction(),
        lambda count: values["rate"] * schedule(count),
        matrices=curvax.MatrixRule(block_size=512),
        others=optax.adamw(lambda count: OTHERS / width * schedule(count), b2=0.99),
        **side,
    )
    return optax.chain(optax.clip_by_global_norm(CLIP), made)


@functools.lru_cache(1)
def task_of(width: int) -> Task:
    """The language model of a width."""
    task = language("prose", STEPS, width=width, heads=width // HEAD, **SIZES)

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return x * (1 / (0.02 * math.sqrt(x.shape[0]))) if is_kernel else x

    def params(key: jax.Array) -> Any:
        return jax.tree_util.tree_map_with_path(scaled, task.params(key))

    return dataclasses.replace(task, params=jax.jit(params))


@functools.lru_cache(1)
def program_of(arm: Arm, width: int) -> Program:
    """The training with an arm, at any rate."""
    return Program(functools.partial(optimizer, arm, width), task_of(width), time.process_time)


class Cell(NamedTuple):
    """A run."""

    width: int
    method: str
    kept: str
    rate: float


Runs = Mapping[Cell, Mapping[str, Any]]


def losses(arm: Arm, width: int, runs: Runs) -> dict[float, float]:
    """Final losses by rate; infinite where a run diverged."""
    found = {c.rate: x["loss"] for c, x in runs.items() if c[:3] == (width, arm.method, arm.kept)}
    return {rate: math.inf if loss is None else loss for rate, loss in found.items()}


def descent(found: Mapping[float, float], start: float) -> float | None:
    """The next rate; `None` if both neighbors of the best are worse."""
    if not found:
        return start
    best = min(found, key=found.__getitem__)
    return next((rate for rate in (best / 2, best * 2) if rate not in found), None)


def upcoming(arm: Arm, widths: tuple[int, ...], runs: Runs) -> Cell | None:
    """The next run of an arm, width after width."""
    start = arm.start
    first = None
    for width in widths:
        found = losses(arm, width, runs)
        rate = descent(found, start)
        if rate is None and first is not None and first not in found:
            rate = first
        if rate is not None:
            return Cell(width, arm.method, arm.kept, rate)
        start = min(found, key=found.__getitem__)
        first = start if first is None else first
    return None


def run(path: Path, most: int | None = None, widths: tuple[int, ...] = WIDTHS) -> None:
    """Makes the missing runs, at most so many: the small widths of all arms first."""
    runs = dict(_lines.recorded(path, Cell))
    about = {"steps": STEPS, **SIZES, **_record.machine()}
    with tqdm(desc="widths", unit="run", file=sys.stderr) as bar:
        while most is None or bar.n < most:
            cells = [(cell, arm) for arm in ARMS if (cell := upcoming(arm, widths, runs))]
            if not cells:
                return
            cell, arm = min(cells, key=lambda x: x[0].width)
            bar.set_postfix_str(f"{cell.width} {cell.method} {cell.kept} {cell.rate:g}")
            done = program_of(arm, cell.width).train({"rate": cell.rate}, seed=0, last=True)
            line = {**cell._asdict(), "loss": done["loss"]}
            line["text"] = task_of(cell.width).sizes["text"]
            line["cpu_seconds"] = round(sum(done["seconds"]), 1)
            _lines.append(path, line | about)
            runs[cell] = line
            bar.update()


def shown(path: Path = LINES, widths: tuple[int, ...] = WIDTHS) -> str:
    """The table of `docs/start.md`: best rates, and what the smallest width's costs elsewhere."""
    runs = _lines.recorded(path, Cell)
    rows = []
    for arm in ARMS:
        if upcoming(arm, widths, runs) is None:
            found = [losses(arm, width, runs) for width in widths]
            best = [min(x, key=x.__getitem__) for x in found]
            rates = [f"{rate:g}" for rate in best]
            last = found[-1]
            costs = [f"{last[best[-1]]:.3f}", f"{last[best[0]] - last[best[-1]]:+.3f}"]
            rows.append([f"`{arm.method}`", arm.kept or "none", *rates, *costs])
    titles = ["method", "what keeps its rate", *(f"width {width}" for width in widths)]
    titles += [f"loss at {widths[-1]}", f"more at the rate of {widths[0]}"]
    return _record.table(titles, rows)


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = _record.parser_of(__doc__)
    parser.add_argument("--most", type=int, help="runs after which to stop")
    parser.add_argument("--lines", type=Path, default=LINES, help="the lines (%(default)s)")
    parser.add_argument("--status", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.status:
        run(args.lines, args.most)
    print(shown(args.lines))
