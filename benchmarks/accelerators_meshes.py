"""Updates on slices of 16 and 256 TPUs: collectives by kind, and memory of a device.

    python -m benchmarks meshes                                      # needs jax[tpu], no TPU
    python -m benchmarks meshes --model 1B --slice 4x4 --layout fsdp --methods muon
    python -m benchmarks meshes --model 7B-1 --whole                 # fewer matrices than devices
    python -m benchmarks meshes --only table                         # from what is recorded

The update of LLaMA's kernels in bfloat16, layers stacked on a leading axis, compiled for v5e slices
by XLA's TPU compiler; nothing runs. Devices are a mesh (data, model). *fsdp*: kernels sharded over
all devices along the axis of the model's width; *tensor*: over the model axis, columns of the first
kernels of attention and MLP and rows of the last; *data*: replicated. Gradients are averaged and
sharded like the kernels. Methods run with `mesh=`, which divides matrices over all devices, and
without. Where devices share matrices, `--whole` also compiles `mesh=` with every matrix on one
device. A cell is a line of `meshes.jsonl` beside the results and is compiled once. XLA may exchange
the parts of a product in a loop, while it multiplies others; here it may not, so that every FLOP
and byte is counted.
"""

from __future__ import annotations

# isort: off
from ._compilers import compiled, devices

# isort: on
import collections
import itertools
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvax.transforms.distribute import _shares
from tests.hlo import collectives

from . import _lines, _record
from ._devices import abstract_state, own_bytes
from ._methods import METHODS, PEERS
from ._programs import once
from ._trees import abstract_kernels
from .accelerators import MODELS, NUMBERS, own_method, without_refreshes

SECTIONS = ("compile", "table")
SLICES = {"4x4": (4, 4), "16x16": (16, 16)}
LAYOUTS = ("fsdp", "tensor", "data")
LAST = ("out", "down")  # kernels whose columns are the model's width
CHOSEN = ("muon", "racs", "soap", "shampoo", "galore", "sumo")
WITHOUT_WINDOWS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 2**31 - 1}
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class Cell(NamedTuple):
    """One program."""

    model: str
    slice: str
    layout: str
    method: str
    mesh: bool  # `mesh=`
    shared: bool  # devices may share a matrix


def mesh_of(name: str) -> Mesh:
    """All devices of a slice."""
    shape = SLICES[name]
    found = np.array(devices("v5e", name)).reshape(shape)
    return Mesh(found, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec_of(kernel: str, layout: str) -> P:
    """How a kernel of all layers lies."""
    last = kernel in LAST
    if layout == "fsdp":
        axes = ("data", "model")
        return P(None, None, axes) if last else P(None, axes)
    if layout == "tensor":
        return P(None, "model") if last else P(None, None, "model")
    return P()


def on_mesh(x: Any, sharding: NamedSharding) -> Any:
    """A shape with its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a cell's program."""
    model, dtype = MODELS[cell.model]
    mesh = mesh_of(cell.slice)
    if cell.method in PEERS:
        make = NUMBERS.get(cell.method, PEERS[cell.method].make)
    else:
        how: dict[str, Any] = {"mesh": mesh} if cell.mesh else {}
        make = own_method(cell.method, scanned=True, **how).make
    optimizer = make(10, model.width // 4)
    params = {
        name: {"kernel": on_mesh(kernel["kernel"], NamedSharding(mesh, spec_of(name, cell.layout)))}
        for name, kernel in abstract_kernels(model, dtype, scanned=True).items()
    }

    def step(state: Any, gradients: Any, params: Any) -> Any:
        return optimizer.update(gradients, state, params)[::-1]

    cost = _shares.EXCHANGE if cell.shared else 1e99
    with without_refreshes(), mock.patch.object(_shares, "EXCHANGE", cost):
        state = abstract_state(optimizer, params, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, (state, params))
        made = compiled(
            "v5e",
            step,
            (state, params, params),
            donated=(0, 1),
            out_shardings=shardings,
            compiler_options=WITHOUT_WINDOWS,
        )
    if made is None:
        return {"error": "does not fit"}
    size = math.prod(SLICES[cell.slice])
    found = collectives(once(made.program.as_text()))
    received: collections.Counter[str] = collections.Counter()
    for exchange in found:
        received[exchange.kind] += round(exchange.received(size))
    return {
        "matrices": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
        "received": dict(received),
        "collectives": len(found),
        "inside": sum(exchange.inside for exchange in found),
        "flops": made.program.cost_analysis()["flops"],
        "state": own_bytes(state),
        "temporaries": made.temporaries,
        "whole": made.whole,
        "compile": round(made.compile_seconds, 2),
    }


def cells(args: Any) -> list[Cell]:
    """The cells that the arguments select."""
    how = [(True, True), (False, True), *([(True, False)] if args.whole else [])]
    grid = itertools.product(args.model, args.slice, args.layout, args.methods, how)
    found = [Cell(*cell[:4], *cell[4]) for cell in grid]
    return [cell for cell in found if not (cell.mesh and cell.method in PEERS)]


COLUMNS = {
    "method": ("method", ""),
    **{kind: (f"{kind}, of the matrices", ".3f") for kind in KINDS},
    "received": ("received in all", ".3f"),
    "collectives": ("collectives", "d"),
    "inside": ("in loops or branches", "d"),
    "flops": ("GFLOP of a device", ",.1f"),
    "state": ("state of a device, MB", ",.1f"),
    "temporaries": ("temporaries, MB", ",.1f"),
    "whole": ("all of a device, MB", ",.1f"),
    "note": ("", ""),
}


def row_of(cell: Cell, line: dict[str, Any]) -> dict[str, Any]:
    """A line of a table."""
    how = ", `mesh=`" * cell.mesh + ", no matrix shared" * (not cell.shared)
    row: dict[str, Any] = {"method": cell.method + how}
    if "error" in line:
        return row | {"note": line["error"]}
    row |= {kind: line["received"].get(kind, 0) / line["matrices"] for kind in KINDS}
    row["received"] = sum(line["received"].values()) / line["matrices"]
    row |= {key: line[key] / 1e6 for key in ("state", "temporaries", "whole")}
    row["flops"] = line["flops"] / 1e9
    row["note"] = "exchanges in loops: bounds from below" if line["inside"] else ""
    return row | {key: line[key] for key in ("collectives", "inside")}


def tables(lines: dict[Any, dict[str, Any]]) -> list[_record.Table]:
    """One for each model, slice and layout."""
    found = []
    for place in itertools.product(MODELS, SLICES, LAYOUTS):
        own = {cell: line for cell, line in lines.items() if cell[:3] == place}
        if not own:
            continue
        order = sorted(own, key=lambda cell: (list(METHODS).index(cell.method), cell.mesh))
        model, name, layout = place
        shapes, dtype = MODELS[model]
        total = sum(m * n for m, n in shapes.matrices().values()) * shapes.layers
        note = f"{shapes}; {total * np.dtype(dtype).itemsize / 1e6:,.0f} MB of matrices."
        rows = [row_of(cell, own[cell]) for cell in order]
        found.append(_record.Table(f"{model}, v5e:{name}, {layout}", COLUMNS, rows, note))
    return found


def main() -> None:
    """Compiles the missing cells, and writes the tables of all recorded ones."""
    parser = _record.arguments(__doc__, SECTIONS)
    add = parser.add_argument
    names = ("optax.adamw", "optax.contrib.muon", *CHOSEN)
    for option, allowed, default in (
        ("--model", ("1B", "7B", "7B-1"), ("1B", "7B", "7B-1")),
        ("--slice", tuple(SLICES), tuple(SLICES)),
        ("--layout", LAYOUTS, LAYOUTS),
        ("--methods", names, names),
    ):
        help = f"some of {', '.join(allowed)}, separated by commas"
        add(option, type=_record.names(allowed), default=default, help=help)
    add("--whole", action="store_true", help="also with every matrix on one device")
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    asked = cells(args) if "compile" in args.only else []
    lines = _lines.extended(args, "meshes", "meshes", asked, kind=Cell)
    if "table" not in args.only:
        return
    about = (
        "Updates compiled for slices of TPU v5e by XLA's TPU compiler; no program ran. Bytes that "
        "a device receives in a step, by the kind of collective, over those of the matrices. The "
        "average of the gradients is not counted. Refreshes are left out: they exchange nothing. "
        "FLOPs and bytes in a loop are counted once."
    )
    found = tables(lines)
    settings = {"rank": "a quarter of the width"}
    _record.write(args, "meshes", "Programs for slices of TPUs", about, found, settings)


if __name__ == "__main__":
    main()
