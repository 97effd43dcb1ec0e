"""Refreshes by decompositions, rotations and products: losses, FLOPs, programs, accuracy.

    python -m benchmarks refreshes                  # all that is missing: hours; it resumes
    python -m benchmarks refreshes --only losses    # of training runs of `evidence`
    python -m benchmarks refreshes --only table     # from what is recorded

*Losses* are those of suites of the evidence, each method at its best point there, with other
periods and forms of refreshes. *Programs* are updates of GPT-2-small's kernels for devices that are
not there: of a step that refreshes nothing (`step`), of one that refreshes everything after the
first time (`refresh`), and as they are (`whole`). *Accuracy* is that of one refresh in float32 from
the eigenvectors of an older statistic. Every cell is a line of `refreshes.jsonl`, where
`tracked` are `method="rotations"`.
"""

from __future__ import annotations

# isort: off
from .accelerators import facts  # before JAX

# isort: on
import functools
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvax.transforms.linalg import _turns

from . import _lines, _record
from ._curves import spread
from ._methods import RATE
from ._trees import GPT2_SMALL, abstract_kernels

SECTIONS = ("losses", "programs", "accuracy", "table")
PARTS = ("refresh", "step", "whole")
FORMS = {"eigh": "eigh", "tracked": "rotations", "products": "products"}
"""In recorded lines, and the `method=` of each."""
DOUBLING = "doubling"
"""`"eigh"` too, with `every(k, first="doubling")`."""
SHORT, LONG = "recipe-250", "recipe-500"
SEEDS = (1, 2, 3, 4, 5)
PERIODS = (10, 1, 100, 30, 3)
DEVICES = ("h200", "v5e")
ORDERS, CONDITIONS = (192, 640, 1024, 2048, 4096), ("1e2", "1e4", "1e6")
AIMS = {
    ("soap", 0, "tracked"): 5.0,
    ("soap", 1024, "tracked"): 3.0,
    ("asgo", 0, "tracked"): 2.5,
    ("shampoo", 1024, "tracked"): 6.0,
    ("shampoo", 1024, "products"): 20.0,
}
"""FLOPs of a refresh over those of a step."""
FEW_BITS = {
    "packed": curvax.packed(),
    "packed with 8-bit bases": curvax.packed(bases=curvax.quantized(8)),
}
MEMORY = 0.95  # of the statistics, as in the runs
UNITS = {"float32": 60e12, "X6": 133e12, "X3": 267e12}
"""FLOP/s of an H100's products: in float32, and in six and three of bfloat16 in place of one."""

Recorded = Mapping["Cell", Mapping[str, Any]]


class Cell(NamedTuple):
    """A measurement."""

    section: str  # of programs one of `PARTS`
    place: str  # a suite of the evidence, a device, or a condition number
    method: str
    form: str  # of refreshes
    number: int  # a period, the largest block or 0, or an order
    seed: int


def forms(method: str) -> tuple[str, ...]:
    """How a method can be refreshed."""
    return (*FORMS,)[: 2 if method.startswith("soap") else 3]


def losses() -> Iterator[Cell]:
    """All runs; what matters most comes first."""

    def runs(suite: str, method: str, periods: Any, seeds: Any) -> Iterator[Cell]:
        for seed, period, form in itertools.product(seeds, periods, forms(method)):
            yield Cell("losses", suite, method, form, period, seed)

    yield from runs(SHORT, "soap", (10, 1), SEEDS)
    for seed in SEEDS:
        yield from runs(SHORT, "shampoo", (10,), (seed,))
        yield from runs(SHORT, "asgo", (1,), (seed,))
    yield from runs(LONG, "soap", PERIODS, SEEDS[:1])
    yield from runs(SHORT, "soap", PERIODS, SEEDS[:3])
    yield from runs(LONG, "soap", (10, 100), SEEDS[:3])
    for suite, periods in ((SHORT, (100, 30, 10)), (LONG, (100,))):
        for seed, period in itertools.product(SEEDS[:3], periods):
            yield Cell("losses", suite, "soap", DOUBLING, period, seed)


def programs() -> Iterator[Cell]:
    """All programs; decompositions have no FLOPs of products."""
    cases = (("soap", 0), ("asgo", 0), ("shampoo", 1024), ("soap", 1024), ("shampoo", 0))
    for place, (method, block), form, part in itertools.product(DEVICES, cases, FORMS, PARTS):
        if form in forms(method) and (form != "eigh" or (part != "refresh" and not block)):
            yield Cell(part, place, method, form, block, 0)
    for place, form, stored in itertools.product(DEVICES, forms("soap"), FEW_BITS):
        yield Cell("whole", place, f"soap, {stored}", form, 0, 0)


def accuracies() -> Iterator[Cell]:
    """Of all orders."""
    for order, condition in itertools.product(ORDERS, CONDITIONS):
        yield Cell("accuracy", condition, "followed", "all", order, 0)


class Losses:
    """Trains, with every program compiled once."""

    def __init__(self) -> None:
        """Reads the points that the evidence found."""
        from .evidence import __main__, _lines, _sweep

        self.runner, self.runs = _sweep.Runner(), _lines.read(__main__.FOLDER)

    def measured(self, cell: Cell) -> dict[str, Any]:
        """The loss at the end of a run."""
        from .evidence import _methods, _plan

        best: Any = _plan.best_in(cell.place, cell.method, self.runs)
        point = {**best, "refresh": cell.number}
        if cell.form == DOUBLING:
            point["refresh"] = curvax.every(cell.number, first=DOUBLING)
        else:
            point["method"] = FORMS[cell.form]
        request = _plan.Request(cell.place, cell.method, point, cell.seed)
        begin, run = time.time(), None
        for run in self.runner.program(request).train(_methods.split(point)[1], cell.seed, True):
            if not math.isfinite(run.training[-1]):
                return {"loss": None, **self.runner.about}
        assert run is not None
        seconds = {"cpu_seconds": round(sum(run.seconds), 1), "clock": round(time.time() - begin)}
        return {"loss": run.losses[-1], **seconds, **self.runner.about}


def optimizer(method: str, form: str, part: str, block: int = 0) -> Any:
    """Of a program; statistics are updated at every step."""
    method, _, storage = method.partition(", ")
    refresh = curvax.every(1 if part == "refresh" else 10, offset=0, first=True)
    settings: dict[str, Any] = {"refresh": refresh, "method": FORMS[form]}
    settings |= {"storage": FEW_BITS[storage]} if storage else {}
    settings |= {"statistics_every": 1} if method == "shampoo" else {}
    rule = curvax.MatrixRule(block_size=block or None)
    if part == "refresh":  # without the guard, in whose branches counters are not constant
        direction = getattr(curvax, f"scale_by_{method}")(**settings)
        return curvax.on_matrices(direction, rule, guard=False)
    return getattr(curvax, method)(RATE, matrices=rule, **settings)


def program(cell: Cell) -> dict[str, Any]:
    """Of a cell that is compiled."""
    made = optimizer(cell.method, cell.form, cell.section, cell.number)
    kernels = abstract_kernels(GPT2_SMALL, jnp.float32)
    return facts(cell.place, made, kernels, cell.section)


def accuracy(cell: Cell) -> dict[str, Any]:
    """Of directions `L^(-1/2) G` by bases that were exact before the last gradient.

    The older statistic has a spectrum of evenly spread logarithms. The gradient's covariance is the
    same turned by a tenth, and its number of columns the order.
    """
    order, random = cell.number, np.random.default_rng(cell.seed)
    normal = random.standard_normal
    q = np.linalg.qr(normal((order, order)))[0]
    d = np.logspace(0, -math.log10(float(cell.place)), order)
    turn = normal((order, order)) / (2 * order) ** 0.5
    turned = np.linalg.qr(q + 0.1 * q @ (turn - turn.T) / 2)[0]
    g = (turned * d**0.5) @ normal((order, order)) / order**0.5
    statistic = MEMORY * (q * d) @ q.T + (1 - MEMORY) * g @ g.T
    exact_d, exact = np.linalg.eigh(statistic)
    wanted = (exact / exact_d**0.5) @ (exact.T @ g)

    def cosine(u: Any) -> float:
        """Of the direction with eigenvalues of the statistic in a basis, in float64."""
        u = np.asarray(u, np.float64)
        found = (u / np.sum(u * (statistic @ u), axis=0) ** 0.5) @ (u.T @ g)
        return float(np.sum(found * wanted) / np.linalg.norm(found) / np.linalg.norm(wanted))

    def share(h: Any) -> float:
        """Of what is off the diagonal, in the norm of a matrix scaled to a unit diagonal."""
        h = np.asarray(h, np.float64)
        h = h / np.sqrt(np.outer(h.diagonal(), h.diagonal()))
        return float(np.linalg.norm(h - np.eye(order)) / np.linalg.norm(h))

    with jax.default_matmul_precision("highest"):
        u, x, old = (jnp.asarray(a, jnp.float32) for a in (q, g, np.diag(d)))
        l32 = jnp.asarray(statistic, jnp.float32)
        seen = u.T @ x
        h = MEMORY * old + (1 - MEMORY) * seen @ seen.T
        found = jax.jit(_turns.by_rotations, static_argnums=2)(u, h, 16)
        qr, eigh = jnp.linalg.qr(l32 @ u)[0], jnp.linalg.eigh(l32)[1]
    made = {"before": u, "tracked": found.basis, "qr": qr, "eigh": eigh}
    return {
        **{name: cosine(basis) for name, basis in made.items()},
        "share_before": share(h),
        "share": share(found.statistic),
        "versions": _record.machine()["versions"],
    }


LOSSES = {
    "steps": ("steps", "d"),
    "method": ("method", ""),
    "period": ("period", "d"),
    "seeds": ("seeds", "d"),
    "eigh": ('`"eigh"`, mean (range)', ""),
    "tracked": ('`"tracked"` beyond it', ""),
    "products": ('`"products"` beyond it', ""),
    DOUBLING: ('`"eigh"`, first refreshes at 1, 2, 4, …, beyond it', ""),
}


def several(values: Sequence[float], form: str) -> str:
    """A value, or the mean of several and their range."""
    return spread(values, form) if len(values) > 1 else format(values[0], form)


def losses_table(lines: Recorded) -> _record.Table:
    """Losses by period, and what other forms of refreshes add, seed by seed."""
    found: dict[Any, dict[tuple[str, int], float]] = {}
    for cell, line in lines.items():
        if cell.section == "losses" and line["loss"] is not None:
            steps = int(cell.place.rpartition("-")[2])
            runs = found.setdefault((steps, cell.method, cell.number), {})
            runs[cell.form, cell.seed] = line["loss"]
    rows = []
    order = ("soap", "shampoo", "asgo")
    for key, runs in sorted(found.items(), key=lambda x: (order.index(x[0][1]), x[0])):
        steps, method, period = key
        row: dict[str, Any] = {"steps": steps, "method": f"`{method}`", "period": period}
        paired = set(SEEDS)
        for form in forms(method):
            paired &= {seed for own, seed in runs if own == form}
        if not paired:
            continue
        row |= {"seeds": len(paired), "eigh": several([runs["eigh", x] for x in paired], ".3f")}
        for form in forms(method)[1:]:
            row[form] = several([runs[form, x] - runs["eigh", x] for x in paired], "+.3f")
        early = [runs[DOUBLING, x] - runs["eigh", x] for x in SEEDS if (DOUBLING, x) in runs]
        row |= {DOUBLING: several(early, "+.3f")} if early else {}
        rows.append(row)
    return _record.Table("Losses", LOSSES, rows)


COSTS = {
    "method": ("refresh of", ""),
    "form": ("by", ""),
    "step": ("a step, TFLOP", ".2f"),
    "h200": ("a refresh, TFLOP", ".2f"),
    "h200_over": ("over the step", ".1f"),
    "aim": ("aim", ""),
    "v5e_over": ("over the step, v5e", ".1f"),
    "left": ("decompositions left", "d"),
    **{unit: (f"products in {unit}, ms", ".3g") for unit in UNITS},
    "decomposed": ("decomposed, ms", "d"),
}
PROGRAMS = {
    "method": ("update of", ""),
    "form": ("refreshed by", ""),
    **{
        f"{device}_{key}": (f"{name}: {title}", form)
        for device, name in (("h200", "H200"), ("v5e", "v5e"))
        for key, title, form in (
            ("kernels", "kernels of a step", ",d"),
            ("gb", "GB of a step", ".1f"),
            ("seconds", "tracing and compiling, s", ".0f"),
        )
    },
}


def programs_tables(lines: Recorded) -> list[_record.Table]:
    """What a refresh costs, and what its programs are."""
    costs, rows = [], []
    on_h100 = (_record.FOLDER / "step_h100.md").read_text()
    for method, block, form in dict.fromkeys((x.method, x.number, x.form) for x in programs()):
        of = f"`{method}`" + f" in blocks of {block}" * bool(block)
        row: dict[str, Any] = {"method": of, "form": f'`"{form}"`'}
        cost: dict[str, Any] = dict(row)
        for place in DEVICES:
            found = {part: Cell(part, place, method, form, block, 0) for part in PARTS}
            parts = {x: lines[cell] for x, cell in found.items() if "flops" in lines.get(cell, {})}
            if whole := parts.get("whole"):
                row[f"{place}_kernels"], row[f"{place}_gb"] = whole["kernels"], whole["bytes"] / 1e9
                row[f"{place}_seconds"] = whole["trace"] + whole["compile"]
            if "step" in parts and "refresh" in parts:
                step = parts["step"]["flops"]
                cost[place] = flops = (parts["refresh"]["flops"] - step) / 1e12
                cost[f"{place}_over"] = over = 1e12 * flops / step
                cost["left"] = cost.get("left", 0) + parts["refresh"]["decompositions"]
                cost |= {unit: 1e15 * flops / rate for unit, rate in UNITS.items()}
                cost["step"] = step / 1e12
                aim = AIMS.get((method, block, form))
                cost["aim"] = None if aim is None else _record.verdict(over, aim)
        ms = re.search(rf"^\| {method} \|(?:[^|]*\|){{10}} *([\d.]+)", on_h100, re.MULTILINE)
        if form == "eigh" and not block and ms:
            cost["decomposed"] = round(float(ms[1]))
        rows += [row] if len(row) > 2 else []
        costs += [cost] if len(cost) > 2 else []
    return [_record.Table("Costs", COSTS, costs), _record.Table("Programs", PROGRAMS, rows)]


def accuracy_table(lines: Recorded) -> _record.Table:
    """One minus the cosine, by order and condition."""
    columns = {"order": ("order", "")} | {x: (f"condition {x}", "") for x in CONDITIONS}
    rows: dict[int, dict[str, Any]] = {}
    for cell, line in lines.items():
        if cell.section == "accuracy":
            row = rows.setdefault(cell.number, {"order": str(cell.number)})
            angles = (f"{1 - line[x]:.0e}" for x in ("tracked", "qr", "eigh", "before"))
            tracked, *others = (x.replace("e-0", "e-") for x in angles)
            row[cell.place] = f"{tracked} ({', '.join(others)})"
    return _record.Table("Accuracy", columns, [rows[order] for order in sorted(rows)])


def tables(lines: Recorded) -> list[_record.Table]:
    """All of them, without the columns that nothing is recorded for."""
    found = [losses_table(lines), *programs_tables(lines), accuracy_table(lines)]
    said = [
        {key for row in table.rows for key, x in row.items() if x is not None} for table in found
    ]
    return [
        table._replace(columns={key: x for key, x in table.columns.items() if key in keys})
        for table, keys in zip(found, said, strict=True)
    ]


def shown(title: str) -> str:
    """A table as `docs/performance_details.md` has it."""
    recorded = _lines.recorded(_record.FOLDER / "refreshes.jsonl", Cell)
    table = next(x for x in tables(recorded) if x.title == title)
    return table.markdown().partition("\n\n")[2]


def main() -> None:
    """Measures what is missing, and writes the tables of all that is recorded."""
    parser = _record.arguments(__doc__, SECTIONS)
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, program)
        return
    extended = functools.partial(_lines.extended, args, "refreshes", "refreshes", kind=Cell)
    if "losses" in args.only:
        extended(list(losses()), Losses().measured)
    if "programs" in args.only:
        extended(list(programs()))
    if "accuracy" in args.only:
        extended(list(accuracies()), accuracy)
    if "table" in args.only:
        about = "Losses, FLOPs, programs and accuracy of refreshes."
        found = [table for table in tables(extended([])) if table.rows]
        _record.write(args, "refreshes", "Refreshes", about, found, {})


if __name__ == "__main__":
    main()
