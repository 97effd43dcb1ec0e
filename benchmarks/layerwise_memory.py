"""Memory of whole training steps, ordinary and layer-wise, from the compilers of CPU, TPU and GPU.

    python -m benchmarks layerwise                                  # on a CPU
    python -m benchmarks layerwise --device h200 --sizes 1.3B,7B    # needs jax[cuda12], no GPU
    python -m benchmarks layerwise --device v5e --methods racs      # needs jax[tpu], no TPU
    python -m benchmarks layerwise --device v5e --slice 4x4 --methods racs --sizes 350M

LLaMA in bfloat16 on 256 tokens, its layers scanned with `jax.checkpoint`; AdamW for embedding and
head, its moments in bfloat16; parameters and states donated. The program is compiled for the device
and never run. A GPU's program takes half a minute, a TPU's up to four, most of it for the update.

With `--slice` all of it is sharded over the TPUs of a slice (FSDP), each with a sequence of its
own, and a second table has the collectives. `--host` keeps the states of layers in host memory.
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

import curvax
from curvax.transforms.state._sharding import SMALL

from . import _lines, _record
from ._devices import abstract_state, collectives
from ._programs import once
from ._trees import LLAMA, LLAMA_130M, Shapes

TOKENS, HEAD, RATE, GIB = 256, 64, 1e-3, 2**30
SIZES = {
    "60M": Shapes(512, 1376, 8, 32000),
    "130M": LLAMA_130M,
    "350M": Shapes(1024, 2736, 24, 32000),
    # 5461 there. For widths that 128 does not divide, XLA keeps stacks on a TPU in another layout,
    # and copies them: 1.5 GiB of temporaries for 0.2.
    "1.3B": LLAMA["1.3B"]._replace(inner=5504),
    "7B": LLAMA["7B"],
}
RANKS = {"60M": 128, "130M": 256, "350M": 256, "1.3B": 512, "7B": 1024}  # those of GaLore
KERNELS: dict[str, Any] = {
    "weight_dimension_numbers": {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
}


def in_8_bits(optimizer: Any) -> Any:
    """Its moments of matrices."""
    return curvax.quantize_state(optimizer, where=lambda place, leaf: leaf.ndim > 2)


METHODS: dict[str, Callable[[int], Any]] = {
    "optax.adamw": lambda rank: optax.adamw(RATE),
    "optax.adamw 8 bits": lambda rank: in_8_bits(optax.adamw(RATE)),
    "racs": lambda rank: curvax.racs(RATE, **KERNELS),
    "galore": lambda rank: curvax.galore(RATE, rank=rank, **KERNELS),
    "fira": lambda rank: curvax.fira(RATE, rank=rank, **KERNELS),
    "alice": lambda rank: curvax.alice(RATE, rank=min(rank, 512), **KERNELS),
    "alice untracked": lambda rank: curvax.alice(
        RATE, rank=min(rank, 512), tracking=False, **KERNELS
    ),
    "apollo": lambda rank: curvax.apollo(RATE, rank=rank, **KERNELS),
    "sumo rank 128": lambda rank: curvax.sumo(RATE, rank=128, **KERNELS),
    "muon": lambda rank: curvax.muon(RATE, dtype="float32", **KERNELS),
    "muon 8 bits": lambda rank: in_8_bits(curvax.muon(RATE, dtype="float32", **KERNELS)),
}
COLUMNS = {
    "size": ("model", ""),
    "method": ("method", ""),
    "weights": ("weights", ".2f"),
    "state": ("state", ".2f"),
    "away": ("of it on the host", ".2f"),
    "ordinary_more": ("ordinary step: temporaries", ".2f"),
    "ordinary": ("whole", ".2f"),
    "layerwise_more": ("layer-wise: temporaries", ".2f"),
    "layerwise": ("whole", ".2f"),
    "note": ("", ""),
}

EXCHANGED = {
    "size": ("model", ""),
    "method": ("method", ""),
    **{
        f"{step}{key}": (f"{label}{heading}", form)
        for step, label in (("ordinary", "ordinary step: "), ("layerwise", "layer-wise: "))
        for key, heading, form in (
            ("_more", "temporaries", ".2f"),
            ("", "whole", ".2f"),
            ("_received", "received", ".2f"),
            ("_largest", "largest", ".1f"),
            ("_kinds", "collectives", ""),
        )
    },
    "layer": ("kernels of a layer, MiB", ".1f"),
    "stack": ("of all layers", ".1f"),
    "note": ("", ""),
}


def parameters(model: Shapes) -> dict[str, Any]:
    """Shapes of embedding, stacked layers and head."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}

    layers = {name: kernel(model.layers, *shape) for name, shape in model.matrices().items()}
    table = jax.ShapeDtypeStruct((model.vocabulary, model.width), jnp.bfloat16)
    head = kernel(model.width, model.vocabulary)
    return {"embed": {"embedding": table}, "layers": layers, "head": head}


def normalized(x: jax.Array) -> jax.Array:
    """RMSNorm without a scale."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)


def embed(p: Any, tokens: jax.Array) -> jax.Array:
    """Vectors of tokens."""
    return p["embedding"][tokens]


def block(p: Any, x: jax.Array) -> jax.Array:
    """A layer of LLaMA; positions take no memory worth counting."""
    heads = (len(x), x.shape[-1] // HEAD, HEAD)
    h = normalized(x)
    query, key, value = (
        (h @ p[name]["kernel"]).reshape(heads) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("thd,shd->hts", query, key, preferred_element_type=jnp.float32)
    past = jnp.tril(jnp.ones((1, len(x), len(x)), bool))
    weights = jax.nn.softmax(jnp.where(past, scores / math.sqrt(HEAD), -1e9)).astype(x.dtype)
    mixed = jnp.einsum("hts,shd->thd", weights, value).reshape(x.shape)
    x = x + mixed @ p["out"]["kernel"]
    h = normalized(x)
    gated = jax.nn.silu(h @ p["gate"]["kernel"]) * (h @ p["up"]["kernel"])
    return x + gated @ p["down"]["kernel"]


def loss(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Of the next tokens."""
    logits = (normalized(x) @ p["kernel"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class Model(NamedTuple):
    """The parts of a model, for one sequence or for several."""

    embed: Callable[..., Any] = embed
    block: Callable[..., Any] = block
    loss: Callable[..., Any] = loss


def ordinary(
    model: Model, optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any
) -> Any:
    """All gradients, then all updates."""

    def whole(params: Any) -> jax.Array:
        visit = jax.checkpoint(lambda x, p: (model.block(p, x), None))
        x, _ = jax.lax.scan(visit, model.embed(params["embed"], tokens), params["layers"])
        return model.loss(params["head"], x, targets).mean()

    gradients = jax.grad(whole)(params)
    new, new_states = {}, {}
    for name, optimizer in optimizers.items():
        updates, new_states[name] = optimizer.update(gradients[name], states[name], params[name])
        new[name] = optax.apply_updates(params[name], updates)
    return new, new_states


def layerwise(
    model: Model, optimizers: Any, params: Any, states: Any, tokens: Any, targets: Any
) -> Any:
    """Each update as soon as its gradient exists."""

    def call(name: str, f: Any, x: Any, xs: Any = None, **how: Any) -> Any:
        return curvax.layerwise(f, optimizers[name], params[name], states[name], x, xs, **how)

    backward: dict[str, Any] = {}
    mean = lambda p, x, targets: model.loss(p, x, targets).mean()  # noqa: E731
    x, backward["embed"] = call("embed", model.embed, tokens, stacked=False)
    x, backward["layers"] = call("layers", model.block, x)
    x, backward["head"] = call("head", mean, x, targets, stacked=False)
    dx, new, new_states = 1.0, {}, {}
    for name in ("head", "layers", "embed"):
        new[name], new_states[name], dx = backward[name](dx)
    return new, new_states


def bytes_of(tree: Any) -> int:
    """Of all arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Cell(NamedTuple):
    """Both steps of a method."""

    device: str
    size: str
    method: str
    slice: str  # of v5e; "" is one device
    host: bool  # whether the states of layers are in host memory


def measured(cell: Cell) -> dict[str, Any]:
    """What the programs of a cell say."""
    params, adamw = parameters(SIZES[cell.size]), optax.adamw(RATE)
    layers = METHODS[cell.method](RANKS[cell.size])
    layers = curvax.state_on_host(layers) if cell.host else layers
    optimizers = {"embed": adamw, "layers": layers, "head": adamw}
    states = {name: jax.eval_shape(o.init, params[name]) for name, o in optimizers.items()}
    tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    model, how = Model(), {}
    row: dict[str, Any] = {"weights": bytes_of(params) / GIB, "state": bytes_of(states) / GIB}
    if cell.slice:
        mesh = Mesh(np.array(devices("v5e", cell.slice)), ("devices",))
        params, states, tokens = sharded(optimizers, params, mesh)
        model = on_slice(mesh)
    elif cell.host:
        row["away"] = bytes_of([x for x in jax.tree.leaves(states["layers"]) if x.size > SMALL])
        row["away"] /= GIB
        states["layers"] = on_host(cell.device, states["layers"], SMALL)
    if cell.slice or cell.host:
        shardings = jax.tree.map(lambda x: x.sharding or place(cell.device), (params, states))
        how["out_shardings"] = shardings
    for step in (ordinary, layerwise):
        run, name = functools.partial(step, model, optimizers), step.__name__
        given = params, states, tokens, tokens
        found = compiled(cell.device, run, given, donated=(0, 1), **how)
        row[name] = found and found.whole / GIB
        row[f"{name}_more"] = found and found.temporaries / GIB
        row[f"{name}_seconds"] = found and round(found.compile_seconds, 1)
        if found and cell.slice:
            row |= {f"{name}_{key}": x for key, x in exchanges(found, mesh.size).items()}
    return row


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
    """Collectives of a program: what is received, and the largest in loops and outside."""
    all_of_them = collectives(once(found.program.as_text()))
    return {
        "received": sum(x.received(number) for x in all_of_them) / GIB,
        "largest": max((x.bytes for x in all_of_them if x.inside), default=0) / 2**20,
        "kinds": dict(Counter(f"{x.kind}{' in loops' * x.inside}" for x in all_of_them)),
    }


def draw(rows: list[dict[str, Any]]) -> Figure:
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
                if row[step] is None:
                    text = row.get("note", "does not fit")
                    axis.text(0, i + shift, f" {text}", va="center", fontsize=7)
                    continue
                state = row["state"] - row.get("away", 0.0)
                rest = row[step] - row["weights"] - state
                left = 0.0
                for part, x, color in zip(
                    parts, (row["weights"], state, rest), _record.COLORS, strict=False
                ):
                    label = part if (i, step, size) == (0, "layerwise", sizes[0]) else None
                    axis.barh(i + shift, x, 0.36, left=left, color=color, alpha=alpha, label=label)
                    left += x
        axis.set_yticks(np.arange(len(shown)), [row["method"] for row in shown], fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_title(
            f"LLaMA {size}, GiB: pale the ordinary step, full the layer-wise", fontsize=9
        )
        axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Compiles what is missing, and prints the table of all that is recorded for a device."""
    parser = _record.arguments(__doc__, ("compile", "table"))
    add, methods, sizes = parser.add_argument, tuple(METHODS), tuple(SIZES)
    add("--device", choices=tuple(PLATFORMS), default="cpu", help="(%(default)s)")
    add("--methods", type=_record.names(methods), default=methods, help="separated by commas")
    add("--sizes", type=_record.names(sizes), default=("60M",), help="separated by commas")
    add("--slice", choices=("4x4", "16x16"), default="", help="of v5e")
    add("--host", action="store_true", help="states of layers in host memory")
    _lines.add_arguments(parser, Cell)
    args = parser.parse_args()
    if args.cell:
        _lines.print_one(args, measured)
        return
    name = "layerwise" if args.device == "cpu" else f"layerwise_{args.device}"
    cells = [
        Cell(args.device, size, method, args.slice, args.host)
        for size in args.sizes
        for method in args.methods
        if "compile" in args.only
    ]
    own = None if args.device != "cpu" else measured
    lines = _lines.extended(args, "layerwise", name, cells, own, kind=Cell)
    rows = [{**cell._asdict(), **line} for cell, line in lines.items()]
    rows.sort(key=lambda row: (sizes.index(row["size"]), methods.index(row["method"])))
    one = [labelled(row) for row in rows if not row["slice"]]
    note = (
        f"GiB. Weights in bfloat16, {TOKENS} tokens; AdamW for embedding and head, whose state is "
        "included. *Whole*: arguments, results that do not take the place of one, temporaries. "
        "A step without figures and without a note does not fit the device."
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
        tables.append(_record.Table(f"FSDP on v5e:{slice}", EXCHANGED, found, note))
    title = "Memory of a step, ordinary and layer-wise"
    settings = {"device": args.device, "tokens": TOKENS, "ranks": RANKS}
    _record.write(args, "layerwise", title, about, tables, draw(one), settings, name=name)


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
