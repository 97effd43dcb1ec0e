"""State, decompositions and exchanged bytes on 1 … 8 simulated devices, modelled for 8 … 4096.

    python -m benchmarks scale                       # all tables, about ten minutes
    python -m benchmarks scale --only model          # the formulas alone, half a minute
    python -m benchmarks scale --methods soap --only points,exchange

*Points*: compiled programs on simulated devices of the CPU, which then take a step: bytes of the
state of the device that has most, eigendecompositions executed there at a refresh (callbacks count
them), bytes received (the collectives of the optimized program), beside the formulas of
`_scale_model.py`. Kernels are cut along columns.

*Exchange*: bytes received over those of the matrices, and the number of collectives, for parameters
that are replicated or cut, with Auto and Explicit axes, on 8 devices; `optax.contrib.muon` beside
them. State is that of a device, times the number of devices, over the undivided one: 1 is perfect.

*Model*: the same formulas for LLaMA's shapes in bfloat16. A refresh takes as long as on devices
like this one: decompositions are timed here, and the largest gives those of larger orders by the
cubic law.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _devices, _record
from ._methods import RATE
from ._scale_model import Kind, blocks, matrices_of, predict
from ._timing import percentile
from ._trees import LLAMA, Shapes

SECTIONS = ("points", "exchange", "model")
POINTS = (1, 2, 4, 8)
DEVICES = (8, 64, 512, 4096)
BLOCK = 1024
WHOLE = curvax.MatrixRule(block_size=None)
PRESETS = {"cpu": (128, 256, 512), "gpu": (512, 1024, 2048, 4096)}  # orders that are timed

EVERY_20 = {"refresh": curvax.every(20, offset=1)}
SHAMPOO = functools.partial(curvax.shampoo, RATE, base=None, matrices=WHOLE, **EVERY_20)
CQ_EF = curvax.cholesky(error_feedback=0.95)
KINDS = {
    "muon": Kind(functools.partial(curvax.muon, RATE), lambda m, n: ()),
    "shampoo": Kind(SHAMPOO, lambda m, n: (m, n)),
    "shampoo, CQ+EF": Kind(functools.partial(SHAMPOO, storage=CQ_EF), lambda m, n: (m, n)),
    "soap": Kind(functools.partial(curvax.soap, RATE, **EVERY_20), lambda m, n: (m, n)),
}
ALICE = functools.partial(curvax.alice, RATE, rank=16, leading=5)

POINT = {
    "method": ("method", ""),
    "devices": ("devices", "d"),
    "state": ("state, bytes", ",d"),
    "state_model": ("model", ",d"),
    "decompositions": ("decompositions", "d"),
    "decompositions_model": ("model", "d"),
    "received": ("received, bytes", ",.0f"),
    "received_model": ("model", ",.0f"),
}
EXCHANGE = {
    "method": ("method", ""),
    "axis": ("mesh axis", ""),
    **{
        key: heading
        for cut in _devices.CUTS
        for key, heading in (
            (cut, (cut, ".2f")),
            (f"{cut}, collectives", ("collectives", "d")),
        )
    },
    "inside": ("in loops or branches", "d"),
    "state": ("state", ".3f"),
}
EIGH = {
    "order": ("order", "d"),
    "ms": ("ms", ".1f"),
    "law": ("cubic law from the largest, ms", ".1f"),
}
MODEL = {
    "method": ("method", ""),
    "matrices": ("matrices or blocks", ",d"),
    "devices": ("devices", "d"),
    "working": ("with work", "d"),
    "refresh": ("refresh, s", ",.1f"),
    "balance": ("balance", ".2f"),
    "state": ("state, GB", ",.3f"),
    "rest": ("parameters, gradients, AdamW, GB", ",.3f"),
    "transient": ("left over in a step, GB", ",.3f"),
    "received": ("received in a step, GB", ",.3f"),
}


def points(names: tuple[str, ...], devices: tuple[int, ...], model: Shapes, seed: int) -> Any:
    """What was found, and what the formulas say."""
    rows = []
    cells = [(name, number) for name in names for number in devices]
    for name, number in tqdm(cells, desc="points", file=sys.stderr):
        kind = KINDS[name]
        found = _devices.point(kind.make, model, number, seed)
        said = predict(kind, matrices_of(model), number, "float32")
        row: dict[str, Any] = {"method": name, "devices": number, **found._asdict()}
        row |= {"state_model": said.state, "decompositions_model": said.decompositions}
        rows.append(row | {"received_model": said.received})
    note = (
        f"{model}, kernels cut along columns. State includes counters, which the model leaves out."
    )
    return _record.Table("Simulated devices, and the model", POINT, rows, note)


def exchange(names: tuple[str, ...], devices: int, model: Shapes) -> _record.Table:
    """What is received with every kind of axes and every cut."""
    makes: dict[str, Any] = {name: KINDS[name].make for name in names} | {"alice": ALICE}
    makes |= dict([_devices.PEER])
    cells = [(name, kind) for name in makes for kind in ("Auto", "Explicit")]
    rows = [
        _devices.traffic(name, makes[name], model, kind, devices)
        for name, kind in tqdm(cells, desc="exchange", file=sys.stderr)
    ]
    note = (
        f"Bytes that a device receives in a step over the bytes of the matrices. {model}; "
        f"{devices} simulated devices."
    )
    return _record.Table("Exchange", EXCHANGE, rows, note)


def decompositions(orders: tuple[int, ...], seed: int, rounds: int = 3) -> _record.Table:
    """Times of `eigh`, and what the cubic law makes of that of the largest order."""
    found = []
    for order in tqdm(orders, desc="eigh", file=sys.stderr):
        g = jax.random.normal(jax.random.key(seed), (order, 2 * order))
        factor, eigh, times = g @ g.mT, jax.jit(jnp.linalg.eigh), []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            jax.block_until_ready(eigh(factor))
            times.append(1e3 * (time.perf_counter() - start))
        found.append(percentile(times[1:], 50) or 0.0)
    last = found[-1] / orders[-1] ** 3
    rows = [{"order": d, "ms": ms, "law": last * d**3} for d, ms in zip(orders, found, strict=True)]
    note = "Of smaller orders the law, which leaves out what grows more slowly, says too little."
    return _record.Table("One eigendecomposition", EIGH, rows, note)


def modelled(
    size: str, names: tuple[str, ...], devices: tuple[int, ...], per_cube: float
) -> _record.Table:
    """A LLaMA's optimizer on many devices."""
    model, rows = LLAMA[size], []
    whole = matrices_of(model)
    others = model.parameters - sum(m * n * count for (m, n), count in whole.items())
    for name in names:
        for block in (None, BLOCK) if KINDS[name].factors(1, 1) else (None,):
            shapes = blocks(whole, block)
            for number in devices:
                said = predict(KINDS[name], shapes, number, "bfloat16")
                label = name if block is None else f"{name}, blocks of {block}"
                row: dict[str, Any] = {"method": label, "matrices": said.matrices}
                row |= {"devices": number, "working": said.working}
                if said.cubes:
                    row |= {"refresh": per_cube * said.cubes / 1e3, "balance": said.balance}
                row |= {"state": said.state / 1e9, "transient": said.transient / 1e9}
                row["rest"] = (4 * model.parameters + 8 * others) / number / 1e9
                rows.append(row | {"received": said.received / 1e9})
    note = (
        f"{model}, {model.parameters / 1e9:.1f} billion parameters; embedding and last layer are "
        "AdamW's. Per device; *with work* below *devices* means that there are not enough matrices."
    )
    return _record.Table(f"LLaMA {size}", MODEL, rows, note)


def draw(tables: list[_record.Table]) -> Figure:
    """The measured points on the model's lines, and the model for large numbers of devices."""
    shown = [t for t in tables if t.columns is not EIGH]
    figure = Figure(figsize=(3.6 * max(3, len(shown)), 7), layout="constrained")
    grid = figure.subplots(2, max(3, len(shown)), squeeze=False)
    for axis in grid.flat:
        axis.set_axis_off()
    colors: dict[str, str] = {}
    column = 0
    for table in shown:
        if table.columns is POINT:
            keys = (("state", "state, bytes"), ("received", "received in a step, bytes"))
        elif table.columns is MODEL:
            keys = (("refresh", "refresh, s"), ("total", "memory of a device, GB"))
        else:
            bars(grid[0, column], table)
            column += 1
            continue
        for axis, (key, label) in zip(grid[:, column], keys, strict=True):
            panel(axis, table, key, colors)
            axis.set_axis_on()
            axis.set(xlabel="devices", ylabel=label, title=table.title)
            axis.title.set_fontsize(9)
        column += 1
    handles = {h.get_label(): h for axis in grid.flat for h in axis.get_lines() if h.get_label()}
    handles = {label: h for label, h in handles.items() if not str(label).startswith("_")}
    if not handles:
        return figure
    figure.legend(
        handles.values(),
        handles.keys(),
        title="dots were found, lines are the model's; of equal lines the last is seen",
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    return figure


def bars(axis: Any, table: _record.Table) -> None:
    """What is received, by method, kind of axes and cut."""
    y = np.arange(len(table.rows))
    for i, cut in enumerate(_devices.CUTS):
        found = [row[cut] if isinstance(row[cut], float) else np.nan for row in table.rows]
        axis.barh(y + 0.27 * i, found, 0.27, color=_record.COLORS[i], label=cut)
    axis.set_axis_on()
    axis.set_yticks(y + 0.27, [f"{row['method']}, {row['axis']}" for row in table.rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="received, over the bytes of the matrices", title=table.title)
    axis.title.set_fontsize(9)
    axis.legend(fontsize=7, frameon=False)


def panel(axis: Any, table: _record.Table, key: str, colors: dict[str, str]) -> None:
    """A line for every method that has the figure; in a measured table the model is the line."""
    for name in dict.fromkeys(row["method"] for row in table.rows):
        rows = [row for row in table.rows if row["method"] == name]
        base = name.partition(", blocks")[0]
        color = colors.setdefault(base, _record.COLORS[len(colors) % 7])
        dashes = "--" if base != name else "-"
        x = [row["devices"] for row in rows]
        if table.columns is POINT:
            axis.plot(x, [row[key] or np.nan for row in rows], "o", color=color)
            y = [row[f"{key}_model"] or np.nan for row in rows]
        elif key == "total":
            y = [row["state"] + row["rest"] + row["transient"] for row in rows]
        else:
            y = [row.get(key, np.nan) for row in rows]
        if not np.isnan(y).all():
            axis.plot(x, y, dashes, color=color, label=name)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(x, [str(number) for number in x])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def main() -> None:
    """Prints the tables that the arguments ask for."""
    _devices.simulate(max(POINTS))
    parser = _record.arguments(__doc__, SECTIONS)
    add, names = parser.add_argument, tuple(KINDS)
    families = tuple(dict.fromkeys(name.partition(",")[0] for name in names))
    add("--methods", type=_record.names(families), default=families, help="separated by commas")
    add("--devices", type=int, default=max(POINTS), help="simulated, at most (%(default)s)")
    add("--width", type=int, default=64, help="of the simulated model (%(default)s)")
    add("--layers", type=int, default=12, help="of the simulated model (%(default)s)")
    args = parser.parse_args()
    names = tuple(name for name in names if name.partition(",")[0] in args.methods)
    model = Shapes(args.width, 4 * args.width, args.layers, 0, gated=False)
    tables = []
    if "points" in args.only:
        number = tuple(n for n in POINTS if n <= args.devices)
        tables.append(points(names, number, model, args.seed))
    if "exchange" in args.only:
        tables.append(exchange(names, args.devices, model))
    if "model" in args.only:
        timed = decompositions(PRESETS[args.preset], args.seed)
        tables.append(timed)
        per_cube = timed.rows[-1]["ms"] / timed.rows[-1]["order"] ** 3
        tables += [modelled(size, names, DEVICES, per_cube) for size in LLAMA]
    about = (
        "What a device has, does and receives when matrices are divided among devices, found on "
        "simulated ones and modelled for many (`benchmarks/_scale_model.py`). A matrix is never "
        "divided, a block is one. *Balance* is the devices' mean work at a refresh over the most."
    )
    settings = {"width": args.width, "layers": args.layers, "devices": args.devices}
    _record.write(args, "scale", "Many devices", about, tables, draw(tables), settings)


if __name__ == "__main__":
    main()
