"""What a default call costs on a GPU and a TPU: from programs, and by a model of time.

    python -m benchmarks costs                      # compiles what is missing: an hour
    python -m benchmarks costs --only table

A cell is the update of GPT-2-small's kernels by a method as it is called without options (low-rank
methods: a quarter of the width), compiled for a device that is not there: a step that refreshes
nothing (`step`), and one that refreshes everything (`refresh`). A loop of rotations runs once in
it; `more` is what each further rotation adds. `rotations` counts them in training: of each refresh
of the language model of the evidence, the fewest that give its result.

*Milliseconds* on an H100 are measured where the program is still that of `step_h100.md`. Otherwise
they are predicted: bytes, FLOPs by precision, and kernels of a program, each at a rate, which are
fitted to the measured rows by least squares of relative errors. `measured` cells are the programs
of those rows, compiled by the code of 2026-11-28 (a455773).
"""

from __future__ import annotations

# isort: off
from ._compilers import PLATFORMS  # before JAX

# isort: on
import collections
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

import curvax
from tests.registry import METHODS as ROWS

from . import _lines, _record
from ._methods import METHODS, of_rank
from ._trees import GPT2_SMALL, abstract_kernels
from .accelerators import facts

SECTIONS = ("programs", "rotations", "table")
DEVICES = ("h200", "v5e")
NAMED = {row.name: row for row in ROWS}
TRAINED = {"soap": (10, 3, 1), "asgo": (1,), "foam": (10,)}
"""Periods at which rotations are counted."""
UNITS = ("bytes", "flops", "exact", "kernels")
H100 = _record.FOLDER / "step_h100.md"
TRAINING_STEP = 71.9  # ms, of GPT-2-small with AdamW: overhead_h100.md
EVERY = 7  # each so many refreshes are counted


class Cell(NamedTuple):
    """A program, or a training run whose rotations are counted."""

    device: str
    method: str
    part: str  # "step", "refresh", "measured", or "rotations" with a period


def programs() -> Iterator[Cell]:
    """All of them; the cheapest compiler first."""
    for device, row, part in itertools.product(DEVICES, ROWS, ("step", "refresh")):
        if part == "step" or row.keeps:
            yield Cell(device, row.name, part)
        if row.name == "muon" and part == "step":
            yield Cell(device, "optax.adamw", part)


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a program."""
    kernels = abstract_kernels(GPT2_SMALL, jnp.float32)
    rank = GPT2_SMALL.width // 4
    if cell.part != "refresh":
        return facts(cell.device, METHODS[cell.method].make(10, rank), kernels, "step")
    # Without the guard, in whose branches counters are not constant.
    row = NAMED[cell.method]
    always: dict[str, Any] = {"refresh": curvax.every(1, offset=0, first=True)}
    always = {"check_every": 1, "threshold": 1e-12} if row.own_policy else always
    always |= {"statistics_every": 1} if row.name == "shampoo" else {}
    direction = row.direction(**of_rank(row.name, rank), **always)
    return facts(cell.device, curvax.on_matrices(direction, guard=False), kernels, "refresh")


def rotations(cell: Cell) -> dict[str, Any]:
    """The mean number of rotations in a refresh, after the first tenth of a run."""
    from curvax.transforms.kronecker._methods import Rotations
    from curvax.transforms.linalg import _turns

    from .evidence import __main__ as evidence
    from .evidence import _lines as lines
    from .evidence import _methods, _plan, _sweep

    seen: list[tuple[np.ndarray, np.ndarray]] = []

    class Seen(Rotations):
        def turn(self, u: jax.Array, h: jax.Array, again: Any) -> Any:
            jax.debug.callback(lambda *x: seen.append((np.array(x[0]), np.array(x[1]))), u, h)
            return super().turn(u, h, again)

    best: Any = _plan.best_in("recipe-250", cell.method, lines.read(evidence.FOLDER))
    period = int(cell.part.split()[1])
    point = {**best, "method": Seen()}
    if cell.method != "foam":
        point["refresh"] = period
    request = _plan.Request("recipe-250", cell.method, point, 0)
    for _ in _sweep.Runner().program(request).train(_methods.split(point)[1], 0, True):
        jax.effects_barrier()
    turn, counts = jax.jit(_turns.by_rotations, static_argnums=2), []
    for u, h in seen[len(seen) // 10 :: EVERY]:
        last = turn(u, h, _turns.ROTATIONS).matrix
        same = (n for n in range(1, _turns.ROTATIONS) if (turn(u, h, n).matrix == last).all())
        counts.append(next(same, _turns.ROTATIONS))
    found = collections.Counter(counts)
    return {"mean": float(np.mean(counts)), "counts": dict(sorted(found.items()))}


def times_of_h100() -> dict[str, dict[str, float]]:
    """Measured milliseconds of a step and of a refresh, by method."""
    lines = H100.read_text().split("## ")[1].splitlines()
    cells = [re.split(r" *\| *", x)[1:-1] for x in lines if x.startswith("|")]
    titles = cells[0].index("p50, ms"), cells[0].index("refresh, p50, ms")
    return {
        row[0]: {"step": float(row[titles[0]]), "refresh": float(row[titles[1]] or "nan")}
        for row in cells[2:]
    }


class Model(NamedTuple):
    """Milliseconds of a program on an H100, from rates."""

    rates: np.ndarray  # ms for a unit of each of `UNITS`
    errors: dict[str, float]  # relative, of each row without which it was fitted

    def ms(self, line: Mapping[str, float]) -> float:
        """Predicted."""
        return float(self.rates @ units_of(line))


def units_of(line: Mapping[str, float]) -> np.ndarray:
    """FLOPs in JAX's default precision, and those in float32, are apart."""
    found = np.array([line[x] for x in UNITS], float)
    found[1] -= found[2]
    return found


def fitted(lines: Mapping[Cell, Mapping[str, Any]]) -> Model:
    """To the rows of the H100 whose programs decompose nothing."""
    times = times_of_h100()
    rows = {
        cell.method: line
        for cell, line in lines.items()
        if cell.part == "measured" and not line["decompositions"]
    }
    a = np.stack([units_of(line) / times[name]["step"] for name, line in rows.items()])
    scale = a.max(axis=0)

    def solved(kept: np.ndarray) -> np.ndarray:
        return nnls(a[kept] / scale, np.ones(kept.sum()))[0] / scale

    errors = {}
    for i, name in enumerate(rows):
        errors[name] = float(a[i] @ solved(np.arange(len(a)) != i) - 1)
    return Model(solved(np.ones(len(a), bool)), errors)


def period_of(name: str) -> int:
    """Of its refreshes by default, or of the checks of its policy."""
    import inspect

    parameters = inspect.signature(getattr(curvax, name)).parameters
    if "check_every" in parameters:
        return parameters["check_every"].default
    policy = parameters["refresh"].default
    return policy if isinstance(policy, int) else policy.schedule.period


COLUMNS = {
    "method": ("default call", ""),
    "period": ("refreshed every", "d"),
    "step": ("a step, TFLOP", ".2f"),
    "refresh": ("a refresh more", ".2f"),
    "over": ("over a step", ".1f"),
    "gb": ("GB of a step", ".1f"),
    "kernels": ("kernels", ",d"),
    "left": ("decompositions", "d"),
    "tpu_gb": ("v5e: GB", ".1f"),
    "tpu_kernels": ("kernels", ",d"),
    "tpu_left": ("decompositions", "d"),
    "ms": ("H100: a step, ms", ""),
    "refresh_ms": ("a refresh", ""),
    "mean_ms": ("mean", ".1f"),
    "training": ("training step over AdamW's", ".2f"),
}


def row_of(name: str, lines: Mapping[Cell, Any], model: Model) -> dict[str, Any]:
    """A default call."""
    step, refresh = lines[Cell("h200", name, "step")], lines.get(Cell("h200", name, "refresh"))
    row: dict[str, Any] = {"method": f"`{name}`", "step": step["flops"] / 1e12}
    row |= {"gb": step["bytes"] / 1e9, "kernels": step["kernels"]}
    times, before = times_of_h100(), lines.get(Cell("h200", name, "measured"))
    own = times.get(name, {})
    same = before is not None and np.allclose(units_of(before), units_of(step), rtol=0.05)
    ms = own["step"] if same else model.ms(step)
    row["ms"] = f"{ms:.1f}" if same else f"≈ {ms:.1f}"
    row["left"] = step["decompositions"]
    tpu = lines.get(Cell("v5e", name, "step"))
    if tpu and "bytes" in tpu:
        row |= {"tpu_gb": tpu["bytes"] / 1e9, "tpu_kernels": tpu["kernels"]}
        row["tpu_left"] = lines.get(Cell("v5e", name, "refresh"), tpu).get("decompositions")
    mean = ms
    if refresh:
        rounds = rounds_of(name, lines)
        more = {x: refresh[x] + (rounds - 1) * refresh["more"][x] - step[x] for x in UNITS}
        row |= {"refresh": more["flops"] / 1e12, "over": more["flops"] / step["flops"]}
        row |= {"left": refresh["decompositions"], "period": period_of(name)}
        measured = same and refresh["decompositions"]
        extra = own["refresh"] - own["step"] if measured else model.ms(more)
        row["refresh_ms"] = f"{extra:.0f}" if measured else f"≈ {extra:.0f}"
        mean += extra / row["period"]
    row["mean_ms"] = mean
    row["training"] = (TRAINING_STEP - times["optax.adamw"]["step"] + mean) / TRAINING_STEP
    return row


def rounds_of(name: str, lines: Mapping[Cell, Any]) -> float:
    """The mean number of rotations in a refresh at its period, of the method or of SOAP."""
    period = period_of(name)
    own = lines.get(Cell("cpu", name, f"rotations {period}"))
    near = lines.get(Cell("cpu", "soap", f"rotations {10 if period > 1 else 1}"))
    found = own or near
    return found["mean"] if found else 1.0


def shown() -> str:
    """The table as `docs/performance.md` has it."""
    lines = _lines.recorded(_record.FOLDER / "costs.jsonl", Cell)
    return table_of(lines).markdown().partition("\n\n")[2]


def table_of(lines: Mapping[Cell, Any]) -> _record.Table:
    """All default calls."""
    model = fitted(lines)
    names = ["optax.adamw", *(row.name for row in ROWS)]
    rows = [row_of(x, lines, model) for x in names if Cell("h200", x, "step") in lines]
    bytes, default, exact, kernel = model.rates
    errors = ", ".join(f"`{x}` {100 * e:+.0f} %" for x, e in model.errors.items())
    counted = "; ".join(
        f"`{cell.method}` every {cell.part.split()[1]}: {line['mean']:.1f}"
        for cell, line in lines.items()
        if cell.part.startswith("rotations")
    )
    note = (
        f"GPT-2-small's kernels. Without ≈ milliseconds are measured. ≈ is the model: "
        f"{1e-9 / bytes:.1f} TB/s, "
        f"{1e-9 / default if default else np.inf:.0f} TFLOP/s in the default precision and "
        f"{1e-9 / exact if exact else np.inf:.0f} in float32, {1e3 * kernel:.1f} µs a kernel. Its "
        f"errors on measured steps that it was not fitted to: {errors}. Rotations in a refresh, "
        f"counted in training: {counted}. The last column is AdamW's training step of "
        f"{TRAINING_STEP} ms with this update in the place of AdamW's."
    )
    return _record.Table("Default calls", COLUMNS, rows, note)


def main() -> None:
    """Measures what is missing, and writes the table."""
    parser = _record.arguments(__doc__, SECTIONS)
    parser.add_argument(
        "--device",
        type=_record.names(tuple(PLATFORMS)),
        default=DEVICES,
        help="some of h200, v5e",
    )
    parser.add_argument("--part", help="one kind of programs, such as measured")
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    if "rotations" in args.only:
        runs = [Cell("cpu", x, f"rotations {k}") for x, periods in TRAINED.items() for k in periods]
        _lines.extended(args, "costs", "costs", runs, rotations, kind=Cell)
    if "programs" in args.only:
        wanted = [cell for cell in programs() if cell.device in args.device]
        if args.part == "measured":  # by the code of the measured rows
            wanted = [Cell("h200", name, "measured") for name in times_of_h100()]
        _lines.extended(args, "costs", "costs", wanted, kind=Cell)
    if "table" in args.only:
        lines = _lines.extended(args, "costs", "costs", [], kind=Cell)
        about = "What a default call costs; `docs/performance.md` explains it."
        _record.write(args, "costs", "Default calls", about, [table_of(lines)], {})


if __name__ == "__main__":
    main()
