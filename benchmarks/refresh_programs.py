"""Seconds of compiling a step with its refresh, for each method and order, by the real compilers.

    python -m benchmarks refreshes --orders 512                     # on a CPU
    python -m benchmarks refreshes --device v5e --methods soap,alice    # needs jax[tpu], no TPU
    python -m benchmarks refreshes --device h200                    # needs jax[cuda12], no GPU

One square kernel; the program is compiled for the device and never run. Each program is compiled in
a process of its own, which is ended after `--limit` seconds. Programs that the results have already
are not compiled again, unless `--again`: an interrupted run goes on.
"""

from __future__ import annotations

# isort: off
from ._compilers import PLATFORMS, compiled

# isort: on
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from tqdm import tqdm

from . import _record
from ._methods import METHODS

ORDERS, RANK = (512, 1024, 2048, 4096), 128
AIM = 60.0
COLUMNS = {
    "method": ("method", ""),
    "order": ("order", "d"),
    "traced": ("CPU time of tracing, s", ".1f"),
    "seconds": ("traced and compiled, s", ".1f"),
    "cpu": ("CPU time of compiling, s", ".1f"),
    "code": ("code, MB", ".1f"),
    "temporaries": ("temporaries, MB", ".0f"),
    "aim": ("aim", ""),
}


def measured(device: str, method: str, order: int) -> dict[str, Any]:
    """What compiling a step of one kernel takes."""
    kernel = {"kernel": jax.ShapeDtypeStruct((order, order), jnp.float32)}
    optimizer = METHODS[method].make(10, min(RANK, order // 4))
    state = jax.eval_shape(optimizer.init, kernel)
    compiled(device, jnp.negative, (kernel["kernel"],))  # starts the compiler
    start = time.perf_counter()
    found = compiled(device, optimizer.update, (kernel, state, kernel))
    assert found is not None, "the device has too little memory"
    row = {"traced": found.trace_seconds, "seconds": time.perf_counter() - start}
    row["cpu"] = found.compile_seconds
    row["code"] = found.program.memory_analysis().generated_code_size_in_bytes / 1e6
    return row | {"temporaries": found.temporaries / 1e6}


def in_a_process(device: str, method: str, order: int, limit: float) -> dict[str, Any]:
    """`measured`, or without figures if it takes longer than the limit."""
    cell = [device, method, str(order)]
    command = [sys.executable, "-m", "benchmarks.refresh_programs", "--cell", *cell]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"aim": f"stopped after {limit:.0f} s"}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    return row | {"aim": _record.verdict(row["seconds"], AIM)}


def recorded(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run."""
    return json.loads(path.read_text())["tables"][0]["rows"] if path.exists() else []


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Seconds against the order."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for i, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [row for row in rows if row["method"] == method and "seconds" in row]
        style: dict[str, Any] = {"color": _record.COLORS[i % 7], "ls": ("-", "--", ":")[i // 7 % 3]}
        x, y = [row["order"] for row in own], [row["seconds"] for row in own]
        axis.plot(x, y, marker=".", label=method, **style)
    axis.axhline(AIM, color="0.8")
    axis.set(xscale="log", yscale="log", xlabel="order", ylabel="seconds of compiling")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def main() -> None:
    """Prints the table that the arguments ask for."""
    if sys.argv[1:2] == ["--cell"]:
        device, method, order = sys.argv[2:]
        print(json.dumps(measured(device, method, int(order))))
        return
    parser = _record.arguments(__doc__)
    refreshing = tuple(name for name, m in METHODS.items() if m.refreshes and "." not in name)
    plain = tuple(name for name in refreshing if "," not in name)
    add = parser.add_argument
    add("--device", choices=tuple(PLATFORMS), default="cpu", help="(%(default)s)")
    add("--methods", type=_record.names(refreshing), default=plain, help="separated by commas")
    add("--orders", type=lambda x: tuple(map(int, x.split(","))), default=ORDERS)
    add("--limit", type=float, default=240, help="seconds for a program (%(default)s)")
    add("--again", action="store_true", help="also programs that the results have")
    args = parser.parse_args()
    name = "refreshes" if args.device == "cpu" else f"refreshes_{args.device}"
    cells = [(order, method) for order in args.orders for method in args.methods]
    rows = recorded(args.out / f"{name}.json")
    if args.again:
        rows = [row for row in rows if (row["order"], row["method"]) not in cells]
    known = {(row["order"], row["method"]) for row in rows}
    cells = [cell for cell in cells if cell not in known]
    note = f"One kernel, ranks of {RANK}. Aim: {AIM:.0f} s on two cores that nothing else uses."
    about = (
        "Seconds of tracing and compiling a step that refreshes, by the compiler of the device. "
        "The programs were not run."
    )
    settings = {"device": args.device, "rank": RANK, "limit": args.limit}
    try:
        for order, method in tqdm(cells, desc=args.device, file=sys.stderr):
            row = in_a_process(args.device, method, order, args.limit)
            rows.append({"method": method, "order": order, **row})
    finally:  # what an interrupted run has found stays
        rows.sort(key=lambda row: (list(METHODS).index(row["method"]), row["order"]))
        table = _record.Table(f"One step with its refresh, on {args.device}", COLUMNS, rows, note)
        title = "Compiling refreshes"
        figure = draw(rows)
        _record.write(args, "refreshes", title, about, [table], figure, settings, name=name)


if __name__ == "__main__":
    main()
