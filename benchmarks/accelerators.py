"""Programs of an update for a TPU and a GPU: kernels, bytes, temporaries, seconds of compiling.

    python -m benchmarks accelerators                                   # cells of hours: it resumes
    python -m benchmarks accelerators --device h200 --model 96 --methods muon,racs --plain
    python -m benchmarks accelerators --device v5e --part step --limit 60
    python -m benchmarks accelerators --device cpu --model 96           # seconds of compiling here
    python -m benchmarks accelerators --only table                      # from what is recorded

XLA's compilers make the programs of a v5e (needs `jax[tpu]`) and of an H200 (`jax[cuda12]`) without
the devices; nothing runs. A cell is one program, compiled in a process of its own: a method on the
kernels of a model, its layers separate leaves (`unrolled`) or stacked on a leading axis
(`scanned`); with its refreshes (`whole`) or as if none were ever due (`step`). Every cell is a line
of `accelerators.jsonl` beside the results, and is not compiled again while that line is there.
`_programs.py` does the counting.
"""

from __future__ import annotations

# isort: off
from ._compilers import MEMORY, PLATFORMS, compiled

# isort: on
import contextlib
import importlib.metadata
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import curvax
from curvax.transforms.refresh import _due

from . import _lines, _record
from ._methods import METHODS, NAMES, PEERS, RATE, Method, with_settings
from ._programs import Program
from ._trees import GPT2_SMALL, LLAMA, LLAMA_130M, Shapes, abstract_kernels

SECTIONS = ("compile", "table")
DEVICES = tuple(name for name in PLATFORMS if name != "cpu")
PERIOD, DOES_NOT_FIT = 10, "does not fit"
DECOMPOSED = re.compile(r'op_name="[^"]*/(?:eigh|svd|qr|geqrf|cholesky)["/]')


class Fused(Shapes):
    """With one kernel for queries, keys and values, as in GPT-2's own code."""

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The kernels of one layer."""
        d, inner = self.width, self.inner
        return {"qkv": (d, 3 * d), "out": (d, d), "up": (d, inner), "down": (inner, d)}


MODELS: dict[str, tuple[Shapes, Any]] = {
    "12": (Fused(160, 640, 3, 0), jnp.float32),
    "96": (Fused(160, 640, 24, 0), jnp.float32),
    "gpt2-2": (GPT2_SMALL._replace(layers=2), jnp.float32),
    "gpt2": (GPT2_SMALL, jnp.float32),
    "130M": (LLAMA_130M, jnp.float32),
    # On a TPU 5461 columns, which 128 does not divide, have a layout that makes copies.
    "1B": (LLAMA["1.3B"]._replace(inner=5504), jnp.bfloat16),
    "7B": (LLAMA["7B"], jnp.bfloat16),
    "7B-1": (LLAMA["7B"]._replace(layers=1), jnp.bfloat16),
}
LAYERS, PARTS, STACKS = ("unrolled", "scanned"), ("step", "whole"), ("default", "yes", "no")


class Cell(NamedTuple):
    """One program."""

    device: str
    model: str
    layers: str
    stack: str  # `MatrixRule(stack=)`
    method: str
    part: str


NUMBERS = {
    "optax.contrib.muon": lambda period, rank: optax.contrib.muon(
        RATE,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(1, 2), params
        ),
    ),
}
"""The peer that takes kernels whose first axis is that of the layers, told so."""


def own_method(name: str, scanned: bool, stack: bool | None = None, **settings: Any) -> Method:
    """A method of the registry with its own defaults, blocks included."""
    settings["matrices"] = curvax.MatrixRule(stack=stack)
    if scanned:
        numbers = {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
        settings["weight_dimension_numbers"] = numbers
    return with_settings(name, **settings)


def method_of(cell: Cell) -> Method:
    """The method of a cell."""
    scanned = cell.layers == "scanned"
    if cell.method not in PEERS:
        stack = {"default": None, "yes": True, "no": False}[cell.stack]
        return own_method(cell.method, scanned, stack)
    method = PEERS[cell.method]
    told = scanned and cell.method in NUMBERS
    return method._replace(make=NUMBERS[cell.method]) if told else method


def without_refreshes() -> Any:
    """A program that is traced inside refreshes nothing."""
    return mock.patch.object(_due, "visit_due", lambda visit, batch, *rest: batch)


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a cell's program."""
    model, dtype = MODELS[cell.model]
    optimizer = method_of(cell).make(PERIOD, model.width // 4)
    kernels = abstract_kernels(model, dtype, scanned=cell.layers == "scanned")
    return facts(cell.device, optimizer, kernels, cell.part)


def refreshed(state: Any) -> Any:
    """A state after its first step, in which all was refreshed, with counters as constants."""

    def counts(x: Any) -> bool:
        return "refreshes" in getattr(x, "names", ())

    def once(x: Any) -> Any:
        if counts(x):
            return type(x).zeros(x.value.shape[:-1]).plus(refreshes=1)
        return jnp.ones_like(x) if x.shape == () and x.dtype == jnp.int32 else x

    return jax.tree.map(once, state, is_leaf=counts)


def facts(device: str, optimizer: Any, kernels: Any, part: str) -> dict[str, Any]:
    """The figures of an update's program; `part` may be "refresh", a step after the first.

    Bases are rotated once then.
    """
    state = jax.eval_shape(optimizer.init, kernels)
    gradients = bytes_of(kernels)
    if gradients + bytes_of(state) > MEMORY.get(device, math.inf):
        return {"error": DOES_NOT_FIT}

    def step(state: Any, gradients: Any, params: Any) -> Any:
        state = refreshed(state) if part == "refresh" else state
        return optimizer.update(gradients, state, params)[::-1]

    with without_refreshes() if part == "step" else contextlib.nullcontext():
        made = compiled(device, step, (state, kernels, kernels), donated=(0, 1))
    if made is None:
        return {"error": DOES_NOT_FIT}
    program = Program(text := made.program.as_text(), rotations=int(part == "refresh"))
    counted = program.work if part == "refresh" else program.step
    return {
        "versions": versions(device),
        "leaves": len(jax.tree.leaves(kernels)),
        **{kind: counted.kinds[kind] for kind in ("products", "fusions", "custom calls")},
        **{kind: counted.kinds[kind] for kind in ("copies", "collectives", "others")},
        "kernels": counted.total,
        "all": program.all_kernels.total,
        "loops": program.loops,
        "flops": program.work.flops.total(),
        "exact": program.work.flops["highest"],
        "decompositions": len(DECOMPOSED.findall(text)),
        "bytes": round(counted.bytes),
        "copied": round(counted.copied),
        "least": 2 * gradients + 2 * bytes_of(state),
        "gradients": gradients,
        "state": bytes_of(state),
        "temporaries": made.temporaries,
        "whole": made.whole,
        "trace": round(made.trace_seconds, 2),
        "compile": round(made.compile_seconds, 2),
        "clock": round(made.clock_seconds, 2),
    }


def versions(device: str) -> str:
    """The versions of packages on which the program depends."""
    names = ("jax", "jaxlib", "libtpu" if device == "v5e" else "jax-cuda12-plugin", "optax")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def cells(args: Any) -> Iterator[Cell]:
    """The cells that the arguments select, small models first; a part only where it differs."""
    chosen = [
        name
        for name in METHODS
        if name in args.peers or (name.partition(",")[0] in args.methods)
        if not (args.plain and "," in name)
    ]
    grid = itertools.product(args.model, args.layers, args.part, args.device, chosen, args.stack)
    for model, layers, part, device, method, stack in grid:
        if method not in PEERS and (part == "step" or METHODS[method].refreshes):
            yield Cell(device, model, layers, stack, method, part)
        # GaLore's peer decides by itself when it refreshes, and takes no stacked kernels.
        elif method == "optax.contrib.galore":
            if part == "whole" and layers == "unrolled" and stack == args.stack[0]:
                yield Cell(device, model, layers, "default", method, part)
        elif method in PEERS and part == "step" and stack == args.stack[0]:
            yield Cell(device, model, layers, "default", method, part)


COLUMNS = {
    "method": ("method", ""),
    "kernels": ("kernels in a step", ",d"),
    "products": ("of them products", ",d"),
    "copies": ("copies", ",d"),
    "beyond": ("a leaf, beyond products", ".1f"),
    "refreshes": ("more, in refreshes", ",d"),
    "over_least": ("bytes over the least", ".2f"),
    "copied": ("bytes of copies over gradients", ".2f"),
    "temporaries": ("temporaries over gradients", ".2f"),
    "trace": ("tracing, s", ".1f"),
    "compile": ("compiling, s", ".1f"),
    "trace_whole": ("with refreshes: tracing, s", ".1f"),
    "compile_whole": ("compiling, s", ".1f"),
    "over_least_whole": ("bytes over the least", ".2f"),
    "temporaries_whole": ("temporaries over gradients", ".2f"),
    "over_peer": ("tracing and compiling all, over `optax.contrib.muon`", ".2f"),
    "over_peer_clock": ("by the clock", ".2f"),
    "note": ("", ""),
}


def row_of(
    method: str, step: dict[str, Any] | None, whole: dict[str, Any] | None
) -> dict[str, Any]:
    """A line of a table, from the two programs of a method."""
    row: dict[str, Any] = {"method": method}
    notes = []
    for found, suffix in ((step, ""), (whole, "_whole")):
        if found is None:
            continue
        if "error" in found:
            notes.append(("with refreshes: " if suffix else "step: ") + found["error"])
            continue
        row[f"trace{suffix}"], row[f"compile{suffix}"] = found.get("trace"), found["compile"]
        row[f"temporaries{suffix}"] = found["temporaries"] / found["gradients"]
    plain = next((x for x in (step, whole) if x and "error" not in x), None)
    if plain:
        row |= {key: plain[key] for key in ("kernels", "products", "copies")}
        row["beyond"] = (plain["kernels"] - plain["products"]) / plain["leaves"]
        row["over_least"] = plain["bytes"] / plain["least"]
        if "copied" in plain:
            row["copied"] = plain["copied"] / plain["gradients"]
    if whole and "error" not in whole:
        row["refreshes"] = whole["all"] - whole["kernels"]
        row["over_least_whole"] = whole["bytes"] / whole["least"]
    return row | {"note": "; ".join(notes)}


def tables(lines: dict[Cell, dict[str, Any]]) -> list[_record.Table]:
    """One for each device, model, kind of layers and stacking."""
    found = []
    for model, layers, device, stack in itertools.product(MODELS, LAYERS, PLATFORMS, STACKS):
        own = {
            (cell.method, cell.part): line
            for cell, line in lines.items()
            if cell[:4] == (device, model, layers, stack)
        }
        names = [name for name in METHODS if any((name, part) in own for part in PARTS)]
        if not names:
            continue
        rows = [row_of(name, own.get((name, "step")), own.get((name, "whole"))) for name in names]
        for column, keys in (("over_peer", ("trace", "compile")), ("over_peer_clock", ("clock",))):
            if peer := seconds_of(own, "optax.contrib.muon", keys):
                for row in rows:
                    row[column] = (seconds_of(own, row["method"], keys) or math.nan) / peer
        shapes, dtype = MODELS[model]
        leaves = next((line["leaves"] for line in own.values() if "leaves" in line), 0)
        note = f"{leaves} leaves, {jnp.dtype(dtype).name}: {shapes}. {versions_of(own)}."
        title = f"{device}, {model}, {layers}" + (f", stack {stack}" * (stack != "default"))
        said = {key for row in rows for key, value in row.items() if value not in (None, "")}
        columns = {key: column for key, column in COLUMNS.items() if key in said}
        found.append(_record.Table(title, columns, rows, note))
    return found


def seconds_of(
    lines: dict[tuple[str, str], dict[str, Any]], method: str, keys: tuple[str, ...]
) -> float | None:
    """The sum of the times of an update with its refreshes; None where that is not recorded."""
    line = lines.get((method, "whole"))
    if line is None and not METHODS[method].refreshes:
        line = lines.get((method, "step"))
    return sum(line[key] for key in keys) if line and all(key in line for key in keys) else None


def versions_of(lines: dict[Any, dict[str, Any]]) -> str:
    """The versions in all lines of a table."""
    return "; ".join(dict.fromkeys(x["versions"] for x in lines.values() if "versions" in x))


def arguments() -> Any:
    """The parser."""
    parser = _record.arguments(__doc__, SECTIONS)
    add: Callable[..., Any] = parser.add_argument

    def several(option: str, allowed: tuple[str, ...], default: tuple[str, ...]) -> None:
        help = f"some of {', '.join(allowed)}, separated by commas"
        add(option, type=_record.names(allowed), default=default, help=help)

    several("--device", tuple(PLATFORMS), DEVICES)
    several("--model", tuple(MODELS), tuple(MODELS))
    several("--layers", LAYERS, LAYERS)
    several("--stack", STACKS, STACKS[:1])
    several("--part", PARTS, PARTS)
    several("--methods", NAMES, NAMES)
    several("--peers", tuple(PEERS), tuple(PEERS))
    add("--plain", action="store_true", help="without storages and other variants")
    add("--check", action="store_true", help="fail if a compiler refused a program")
    _lines.add_arguments(parser, Cell)
    return parser


def main() -> None:
    """Compiles the missing cells, and writes the tables of all recorded ones."""
    args = arguments().parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    asked = list(cells(args)) if "compile" in args.only else []
    lines = _lines.extended(args, "accelerators", "accelerators", asked, kind=Cell)
    if "table" not in args.only:
        return
    about = (
        "The update of an optimizer compiled for a TPU v5e and for an H200 by XLA's own compilers. "
        "No program ran: these are counts, not times, but for seconds of tracing and compiling, "
        "which are those of all threads, except *by the clock*, on two cores. *Kernels*: what a "
        "step launches that refreshes nothing. "
        "*Beyond products*: kernels that multiply no matrices. *More, in refreshes*: kernels in "
        "loops and branches that such a step does not take, each once. *Bytes*: read and written "
        "by all kernels of the step, over gradients and state in, updates and state out; a method "
        "that leaves parts of its state alone may be below 1. *Copies*: kernels that only lay an "
        "array out in another way or place."
    )
    found = tables(lines)
    settings = {"period": PERIOD, "rank": "a quarter of the width"}
    _record.write(args, "accelerators", "Programs for accelerators", about, found, settings)
    refused = [
        f"{cell}: {error}"
        for cell in asked
        if (error := lines[cell].get("error", "")) and error != DOES_NOT_FIT
        if not error.startswith(_lines.OVER)
    ]
    if args.check and refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
