"""Bytes of state against the papers' formulas, temporaries, and the peak of a training step.

    python -m benchmarks memory                          # all methods, about 10 minutes
    python -m benchmarks memory --only formulas          # from shapes alone, seconds
    python -m benchmarks memory --methods racs --only steps
    python -m benchmarks memory --only steps --plain --device h200 --preset gpu  # needs jax[cuda12]

*Formulas*: the numbers of the state of one `m × n` matrix as docs/methods.md has them, times four
bytes, beside `curvax.state_bytes`; the rest are counters, flags and random keys, and the m + n
eigenvalues of FOAM and DR-Shampoo. Peers and 4-bit storages have no formula here.

*Steps*: the model of `examples/train_lm.py` (GPT-2-small's sizes on a GPU), compiled with
parameters and state donated, and never run: for a GPU or a TPU by XLA's compilers, without either.
The peak is the memory that XLA reserves: arguments, results that do not take the place of an
argument, and temporaries, mostly activations and gradients. Embedding and head train by AdamW,
except that Optax's peers take them for matrices, and ASGO and DASGO the embedding.
"""

from __future__ import annotations

# isort: off
from ._compilers import PLATFORMS, compiled

# isort: on
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tqdm import tqdm

import curvax

from . import _record
from ._examples import example
from ._methods import NAMES, PEERS, chosen, with_settings
from ._timing import ratio

train_lm = example("train_lm")
SECTIONS = ("formulas", "steps")
SHAPES = {"wide": (768, 3072), "square": (768, 768), "tall": (3072, 768)}
# Width, layers, context, batch, symbols, rank.
PRESETS = {"cpu": (256, 2, 64, 16, 100, 64), "gpu": (768, 12, 1024, 8, 50257, 256)}

# A factor of 50257 symbols would have as many rows and columns.
MATRICES = curvax.MatrixRule(output_layer="auto")

FORMULAS = {
    "method": ("method", ""),
    **{
        key: (heading, form)
        for name, (m, n) in SHAPES.items()
        for key, heading, form in (
            (f"{name}_formula", f"{m}×{n}: formula", ",d"),
            (f"{name}_bytes", "bytes", ",d"),
            (f"{name}_more", "more", "+,d"),
        )
    },
}
STEPS = {
    "method": ("method", ""),
    "state": ("state, MB", ".2f"),
    "update": ("temporaries of the update, MB", ".2f"),
    "step": ("of the training step, MB", ".2f"),
    "peak": ("peak of the step, MB", ".2f"),
    "over_adamw": ("over AdamW's", ".3f"),
}


def formulas(families: tuple[str, ...], rank: int) -> list[dict[str, Any]]:
    """The state of one matrix, as printed and as it is."""
    rows = []
    for name, method in chosen(families).items():
        row: dict[str, Any] = {"method": name}
        for shape_name, shape in SHAPES.items():
            printed = method.numbers and 4 * method.numbers(*shape, rank)
            tree = {"layer": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}
            found = curvax.state_bytes(method.make(10, rank), tree)
            row |= {f"{shape_name}_formula": printed, f"{shape_name}_bytes": found}
            row[f"{shape_name}_more"] = None if printed is None else found - printed
        rows.append(row)
    return rows


def abstract_model(preset: tuple[int, ...], seed: int) -> tuple[Any, Any, Any]:
    """Graph, abstract parameters and abstract windows of text."""
    width, depth, context, batch, symbols, _ = preset
    sizes = {"width": width, "depth": depth, "context": context, "batch": batch, "seed": seed}
    config = train_lm.Config("adamw", 1.0, "", **sizes)
    graph, params = nnx.split(nnx.eval_shape(lambda: train_lm.GPT(config, symbols)), nnx.Param)
    return graph, params, jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def steps(
    families: tuple[str, ...], preset: tuple[int, ...], variants: bool, seed: int, device: str
) -> list[dict[str, Any]]:
    """The memory of the update and of the whole training step of every method, if they fit."""
    graph, params, windows = abstract_model(preset, seed)
    rows = []
    methods = chosen(families, variants)
    for name in methods.keys() - PEERS.keys():
        methods[name] = with_settings(name, matrices=MATRICES)
    for name, method in tqdm(methods.items(), desc="compile", file=sys.stderr):
        optimizer = method.make(10, preset[-1])
        state = jax.eval_shape(optimizer.init, params)

        def loss_of(params: Any, windows: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        def step(state: Any, params: Any, windows: Any, optimizer: Any = optimizer) -> Any:
            grads = jax.grad(loss_of)(params, windows)
            updates, state = optimizer.update(grads, state, params)
            return state, optax.apply_updates(params, updates)

        def update(state: Any, params: Any, optimizer: Any = optimizer) -> Any:
            return optimizer.update(params, state, params)[::-1]

        row = {"method": name, "state": bytes_of(state) / 1e6}
        alone = compiled(device, update, (state, params), donated=(0,))
        whole = compiled(device, step, (state, params, windows), donated=(0, 1))
        if alone and whole:
            row |= {"update": alone.temporaries / 1e6, "step": whole.temporaries / 1e6}
            row["peak"] = whole.whole / 1e6
        rows.append(row)
    adamw = next(row for row in rows if row["method"] == "optax.adamw")
    return [row | {"over_adamw": ratio(row.get("peak"), adamw.get("peak"))} for row in rows]


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    add = parser.add_argument
    add("--methods", type=_record.names(NAMES), default=NAMES, help="separated by commas")
    add("--plain", action="store_true", help="without storages and other variants")
    help = "whose program a step is (%(default)s)"
    add("--device", choices=tuple(PLATFORMS), default="cpu", help=help)
    add("--width", type=int, help="in place of the preset's")
    add("--layers", type=int, help="in place of the preset's")
    args = parser.parse_args()
    width, layers, *rest = PRESETS[args.preset]
    preset = (args.width or width, args.layers or layers, *rest)
    names = ("width", "layers", "context", "batch", "symbols", "rank")
    settings: dict[str, Any] = dict(zip(names, preset, strict=True))
    tables, elsewhere = [], args.device != "cpu"
    params = bytes_of(abstract_model(preset, args.seed)[1]) / 1e6
    if "formulas" in args.only:
        rows = formulas(args.methods, settings["rank"])
        note = (
            f"Bytes of one matrix's state at rank {settings['rank']}. The excess over the formula "
            "consists of counters, flags, random keys, and the eigenvalues of FOAM and DR-Shampoo."
        )
        tables.append(_record.Table("State against formula", FORMULAS, rows, note))
    if "steps" in args.only:
        rows = steps(args.methods, preset, not args.plain, args.seed, args.device)
        note = f"Parameters of {params:.2f} MB; " + ", ".join(
            f"{name} {value}" for name, value in settings.items()
        )
        title = f"A training step on {args.device}" if elsewhere else "A training step"
        tables.append(_record.Table(title, STEPS, rows, note + "."))
    about = (
        "Bytes from shapes and from compiled programs (`memory_analysis`), without a run. The peak "
        "is the sum of arguments, results that do not overwrite an argument, and temporaries."
    )
    name = f"memory_{args.device}" if elsewhere else "memory"
    _record.write(args, "memory", "Memory", about, tables, settings, name=name)


if __name__ == "__main__":
    main()
