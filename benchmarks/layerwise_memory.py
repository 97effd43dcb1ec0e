"""Memory of whole training steps, ordinary and layer-wise, from the compilers of CPU, TPU and GPU.

    python -m benchmarks layerwise                                  # on a CPU
    python -m benchmarks layerwise --device h200 --sizes 1.3B,7B    # needs jax[cuda12], no GPU
    python -m benchmarks layerwise --device v5e --methods racs      # needs jax[tpu], no TPU
    python -m benchmarks layerwise --device v5e --slice 4x4 --methods racs --sizes 350M

LLaMA in bfloat16 on 256 tokens, its layers scanned with `jax.checkpoint`; AdamW for embedding and
head, its moments in bfloat16; parameters and states donated. The program is compiled for the device
and never run. A GPU's program takes half a minute, a TPU's up to four, most of it for the update.

With `--slice` all of it is sharded over the TPUs of a slice or the GPUs of a host (FSDP), each with
a sequence of its own, and a second table has the collectives. `--host` keeps the states of layers
in host memory.
"""

from __future__ import annotations

# isort: off
from ._compilers import PLATFORMS, Compiled, compiled, devices, on_host, place

# isort: on
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import curvax
from curvax.transforms.state._sharding import SMALL
from tests.hlo import collectives

from . import _lines, _record
from ._devices import abstract_state
from ._llama import (
    METHODS,
    RANKS,
    RATE,
    SIZES,
    STEPS,
    TOKENS,
    Model,
    block,
    embed,
    loss,
    parameters,
)
from ._programs import once

GIB = 2**30
COLUMNS = {
    "size": ("model", ""),
    "method": ("method", ""),
    "weights": ("weights", ".2f"),
    "state": ("state", ".2f"),
    "away": ("of it on the host", ".2f"),
    "ordinary_more": ("ordinary step: temporaries", ".2f"),
    "ordinary_beyond": ("of them beyond gradients", ".2f"),
    "ordinary": ("whole", ".2f"),
    "layerwise_more": ("layer-wise: temporaries", ".2f"),
    "layerwise": ("whole", ".2f"),
    "note": ("", ""),
}

USABLE = {"v5e": 15.75}  # GiB of the device, as its compiler says
LABELS = {"ordinary": "ordinary step", "layerwise": "layer-wise"}
EXCHANGED = {
    "size": ("model", ""),
    "method": ("method", ""),
    **{
        f"{step}{key}": (f"{label}: {heading}", form)
        for step, label in LABELS.items()
        for key, heading, form in (
            ("_more", "temporaries", ".2f"),
            ("", "whole", ".2f"),
            ("_received", "received", ".2f"),
            ("_largest", "largest", ".1f"),
            ("_kinds", "collectives", ""),
        )
    },
    "scattered": ("`psum_scatter` alone becomes", ""),
    "layer": ("kernels of a layer, MiB", ".1f"),
    "stack": ("of all layers", ".1f"),
    "note": ("", ""),
}


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Cell(NamedTuple):
    """A step of a method."""

    device: str
    size: str
    method: str
    step: str  # in STEPS
    slice: str  # of v5e, or a number of GPUs; "" is one device
    host: bool  # whether the states of layers are in host memory


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a cell's program."""
    params, adamw = parameters(SIZES[cell.size]), optax.adamw(RATE)
    gradients = bytes_of(params) / GIB  # in the dtype of the weights, or of what they decode to
    if "int8 weights" in cell.method:
        params["layers"] = jax.eval_shape(curvax.to_int8, params["layers"])
    layers = METHODS[cell.method](RANKS[cell.size])
    layers = curvax.state_on_host(layers) if cell.host else layers
    optimizers = {"embed": adamw, "layers": layers, "head": adamw}
    states = {name: jax.eval_shape(o.init, params[name]) for name, o in optimizers.items()}
    tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    model, how, mesh = Model(), {}, None
    row: dict[str, Any] = {"weights": bytes_of(params) / GIB, "state": bytes_of(states) / GIB}
    if cell.slice:
        mesh = Mesh(np.array(devices(cell.device, cell.slice)), ("devices",))
        params, states, tokens = sharded(optimizers, params, mesh)
        model = on_slice(mesh)
    elif cell.host:
        row["away"] = bytes_of([x for x in jax.tree.leaves(states["layers"]) if x.size > SMALL])
        row["away"] /= GIB
        states["layers"] = on_host(cell.device, states["layers"], SMALL)
    if cell.slice or cell.host:
        shardings = jax.tree.map(lambda x: x.sharding or place(cell.device), (params, states))
        how["out_shardings"] = (*shardings, None)
    usable = USABLE.get(cell.device, math.inf) if mesh is None and not cell.host else math.inf
    if row["weights"] + row["state"] + gradients * (cell.step == "ordinary") > usable:
        return row | {"error": "does not fit"}  # nor would a compiler find otherwise
    run, given = functools.partial(STEPS[cell.step], model, optimizers), (params, states)
    found = compiled(cell.device, run, (*given, tokens, tokens), donated=(0, 1), **how)
    if found is None:
        return row | {"error": "does not fit"}
    row |= {"whole": found.whole / GIB, "more": found.temporaries / GIB}
    if cell.step == "ordinary" and mesh is None:
        row["beyond"] = row["more"] / gradients - 1
    row["seconds"] = round(found.compile_seconds, 1)
    return row | (exchanges(found, mesh.size) | scattered(cell.device, mesh) if mesh else {})


SHARED = ("weights", "state", "away", "scattered")


def joined(lines: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for both steps, in the order of the tables."""
    rows: dict[Any, dict[str, Any]] = {}
    for cell, line in lines.items():
        own = rows.setdefault(cell._replace(step=""), cell._asdict())
        own |= {key: line[key] for key in SHARED if key in line}
        own |= {f"{cell.step}_{key}": x for key, x in line.items() if key not in own}
        own[cell.step] = line.get("whole")
    for row in rows.values():
        whys = {
            label: row.get(f"{step}_error") or row.get(f"{step}_note") or "not measured"
            for step, label in LABELS.items()
            if row.get(step) is None or f"{step}_note" in row
        }
        row["note"] = "; ".join(f"{label}: {why}" for label, why in whys.items())
    sizes, methods = list(SIZES), list(METHODS)
    order = lambda row: (sizes.index(row["size"]), methods.index(row["method"]), row["host"])  # noqa: E731
    return sorted(rows.values(), key=order)


def on_slice(mesh: Mesh) -> Model:
    """The model for a sequence on every device, which gathers the parameters that a part needs."""
    rows, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    put = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def gathered(p: Any) -> Any:
        return put(p, jax.tree.map(lambda _: whole, p))

    def back(_: None, gradient: Any) -> tuple[Any]:
        return (put(gradient, jax.tree.map(lambda _: rows, gradient)),)

    gathered.defvjp(lambda p: (gathered(p), None), back)

    def of_each(f: Callable[..., Any], inputs: int) -> Callable[..., Any]:
        mapped = jax.vmap(f, (None, *[0] * inputs))
        return lambda p, *x: put(mapped(gathered(p), *x), rows)

    return Model(of_each(embed, 1), of_each(block, 1), of_each(loss, 2))


def sharded(optimizers: Any, params: Any, mesh: Mesh) -> Any:
    """FSDP: kernels, the table and their states by their rows; a sequence for every device."""
    rows = lambda x: P(*(None,) * (x.ndim - 2), "devices")  # noqa: E731
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, rows(x))),
        params,
    )
    states = {name: abstract_state(o, params[name], mesh) for name, o in optimizers.items()}
    own = NamedSharding(mesh, P("devices"))
    return params, states, jax.ShapeDtypeStruct((mesh.size, TOKENS), jnp.int32, sharding=own)


def exchanges(found: Compiled, number: int) -> dict[str, Any]:
    """Collectives of a program: the received bytes, and the largest in loops and outside."""
    all_of_them = collectives(once(found.program.as_text()))
    return {
        "received": sum(x.received(number) for x in all_of_them) / GIB,
        "largest": max((x.bytes for x in all_of_them if x.inside), default=0) / 2**20,
        "kinds": dict(Counter(f"{x.kind}{' in loops' * x.inside}" for x in all_of_them)),
    }


def scattered(device: str, mesh: Mesh) -> dict[str, Any]:
    """The compiler's form of a bare reduce-scatter."""
    spec = P("devices")

    def own(x: jax.Array, dy: jax.Array) -> jax.Array:
        product = jnp.einsum("bti,btj->ij", x, dy)
        return jax.lax.psum_scatter(product, "devices", scatter_dimension=0, tiled=True)

    step = jax.shard_map(own, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    shape, sharding = (mesh.size, TOKENS, 2048), NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    found = compiled(device, step, (x, x))
    assert found is not None
    kinds = {c.kind for c in collectives(once(found.program.as_text()))}
    return {"scattered": ", ".join(sorted(kinds))}


def draw(rows: list[dict[str, Any]], device: str) -> Figure:
    """Bars of weights, state and the rest: above the ordinary step, below the layer-wise one."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    own = {size: [row for row in rows if row["size"] == size] for size in sizes}
    heights = [len(x) + 1 for x in own.values()]
    figure = Figure(figsize=(8, 1.5 + 0.5 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=heights)[:, 0]
    parts = ("weights", "state", "gradients, activations, temporaries")
    for axis, (size, shown) in zip(panels, own.items(), strict=True):
        for i, row in enumerate(shown):
            for step, shift, alpha in (("ordinary", -0.2, 0.5), ("layerwise", 0.2, 1.0)):
                if row.get(step) is None:
                    text = row.get(f"{step}_error", "not measured")
                    axis.text(0, i + shift, f" {text}", va="center", fontsize=7)
                    continue
                state = row["state"] - row.get("away", 0.0)
                rest = row[step] - row["weights"] - state
                left = 0.0
                for x, color in zip((row["weights"], state, rest), _record.COLORS, strict=False):
                    axis.barh(i + shift, x, 0.36, left=left, color=color, alpha=alpha)
                    left += x
        axis.set_yticks(np.arange(len(shown)), [row["method"] for row in shown], fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_title(
            f"A step of LLaMA {size}, GiB: pale the ordinary step, full the layer-wise", fontsize=9
        )
        axis.grid(axis="x", alpha=0.3)
        usable = USABLE.get(device, math.inf)
        if max(row.get(step) or 0.0 for row in shown for step in LABELS) > usable / 2:
            axis.axvline(usable, color="black", linestyle="--", linewidth=1)
            axis.text(
                usable, 0.5, f"{usable} GiB on a {device} ", ha="right", va="center", fontsize=7
            )
    handles = [
        Patch(color=color, label=part) for part, color in zip(parts, _record.COLORS, strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Compiles the missing cells, and prints the table of all recorded ones for a device."""
    parser = _record.arguments(__doc__, ("compile", "table"))
    add, methods, sizes = parser.add_argument, tuple(METHODS), tuple(SIZES)
    add("--device", choices=tuple(PLATFORMS), default="cpu", help="(%(default)s)")
    add("--methods", type=_record.names(methods), default=methods, help="separated by commas")
    add("--sizes", type=_record.names(sizes), default=("60M",), help="separated by commas")
    add("--steps", type=_record.names(tuple(STEPS)), default=tuple(STEPS), help="of both")
    add("--slice", choices=("4x4", "16x16", "8"), default="", help="of v5e, or GPUs of one host")
    add("--host", action="store_true", help="states of layers in host memory")
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    name = "layerwise" if args.device == "cpu" else f"layerwise_{args.device}"
    cells = [
        Cell(args.device, size, method, step, args.slice, args.host)
        for size in args.sizes
        for method in args.methods
        for step in args.steps
        if "compile" in args.only
    ]
    own = None if args.device != "cpu" else measured
    lines = _lines.extended(args, "layerwise", name, cells, own, kind=Cell)
    rows = joined(lines)
    one = [labelled(row) for row in rows if not row["slice"]]
    note = (
        f"GiB. Weights in bfloat16, {TOKENS} tokens; AdamW for embedding and head, whose state is "
        "included. *Whole*: arguments, results that do not take the place of one, temporaries. "
        "*Beyond gradients*: what the ordinary step's temporaries have beside the gradients of all "
        "weights, over the bytes of these gradients."
    )
    about = (
        "What XLA reserves for a whole training step, from the compiled program of the device, "
        "which was not run: gradients of all layers and then updates, and each layer's update as "
        "soon as its gradient exists (`curvax.layerwise`)."
    )
    tables = [_record.Table(f"LLaMA on {args.device}", COLUMNS, one, note)] if one else []
    for slice in dict.fromkeys(row["slice"] for row in rows if row["slice"]):
        note = (
            "GiB of a device; parameters and states are sharded over all of them by rows, and each "
            "has a sequence of its own. *Largest*: the result of the largest collective in a loop, "
            "MiB, beside the kernels of one layer and of all."
        )
        found = [of_slice(row) for row in rows if row["slice"] == slice]
        tables.append(_record.Table(f"FSDP on {args.device}:{slice}", EXCHANGED, found, note))
    title = "Memory of a step, ordinary and layer-wise"
    settings = {"device": args.device, "tokens": TOKENS, "ranks": RANKS}
    _record.write(
        args, "layerwise", title, about, tables, settings, {name: draw(one, args.device)}, name
    )


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    """A line, its method with where the state is."""
    return row | {"method": row["method"] + ", state on host" * row["host"]}


def of_slice(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table of a slice."""
    model = SIZES[row["size"]]
    layer = sum(m * n for m, n in model.matrices().values()) * 2 / 2**20
    row = row | {"layer": layer, "stack": layer * model.layers}
    for step in ("ordinary", "layerwise"):
        kinds = row.get(f"{step}_kinds") or {}
        row[f"{step}_kinds"] = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return row


if __name__ == "__main__":
    main()
