"""Milliseconds of every method's update, or of a training step with it, beside its peers.

    python -m benchmarks step                                # all methods
    python -m benchmarks step --methods muon,racs --only gpt2,training

*gpt2* and *llama*: the update of the kernels of attention and MLP of GPT-2-small and of LLaMA-130M,
at a third of the width and with two layers on a CPU; embeddings, norms and biases are left out,
because all methods give them to AdamW (ASGO and DASGO apart). Gradients are Gaussian and stay the
same. Storages and other variants are on the first tree alone. *training*: a whole step of the
language model of `examples/train_lm.py`.

States are donated and the programs of a table take turns, in another order every round. Every
method refreshes all that it has once in ten steps, FOAM and DR-Shampoo too, whose threshold no
factor meets here. Step 1 is not counted. A program that has used up its seconds stops, so the
slowest have fewer steps; of less than a hundred the 99th percentile is about the largest.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from tqdm import tqdm

from . import _record
from ._examples import example
from ._methods import METHODS, NAMES, Method, chosen
from ._timing import Program, compile_all, percentile, take_turns, update_of
from ._trees import GPT2_SMALL, LLAMA_130M, kernels

MODELS = {"gpt2": GPT2_SMALL, "llama": LLAMA_130M}
TITLES = {
    "gpt2": "GPT-2-small's kernels",
    "llama": "LLaMA-130M's kernels",
    "training": "A training step",
}
# Width, layers, rank, rounds; context and batch of the training step.
PRESETS = {"cpu": (256, 2, 64, 60, 64, 16), "gpu": (768, 12, 256, 200, 1024, 8)}
SIZES = ("width", "layers", "rank", "rounds", "context", "batch")
PERIOD = 10

COLUMNS = {
    "method": ("method", ""),
    "p50": ("p50, ms", ".2f"),
    "p99": ("p99, ms", ".2f"),
    "steps": ("steps", "d"),
    "over_adamw": ("over AdamW", ".2f"),
    "peer": ("peer", ""),
    "over_peer": ("over it", ".2f"),
    "refresh_p50": ("refresh, p50, ms", ".2f"),
    "refresh_p99": ("p99, ms", ".2f"),
    "refreshes": ("refreshes", "d"),
    "temporaries": ("temporaries, MB", ".1f"),
}


def training_step(optimizer: Any, sizes: dict[str, int], corpus: Any) -> Program:
    """Loss, gradient, update and all else that the example computes in a step."""
    train_lm = example("train_lm")
    with mock.patch.dict(train_lm.OPTIMIZERS, this=lambda *args, **settings: optimizer):
        config = train_lm.Config("this", 1e-3, corpus.digest, **sizes)
        state, step, _ = train_lm.make_run(config, corpus)
    return Program(lambda state, text: (step(state, text), ()), state, corpus.train)


def split(times: list[float], method: Method) -> tuple[list[float], list[float]]:
    """The times between refreshes and at them, without step 1."""
    still, at = [], []
    for step, time in enumerate(times[1:], 2):
        due = method.refreshes and step % PERIOD == method.offset
        (at if due else still).append(time)
    return still, at


def measure(
    section: str, sizes: dict[str, int], seconds: float, methods: dict[str, Method], seed: int
) -> list[dict[str, Any]]:
    """The rows of one table."""
    programs: dict[Any, Program] = {}
    width, layers, rank, rounds, context, batch = (sizes[name] for name in SIZES)
    if section == "training":
        corpus = example("train_lm").read_corpus(None, context)
        own = {"steps": 100, "width": width, "depth": layers, "context": context, "batch": batch}
        make = lambda optimizer: training_step(optimizer, own, corpus)  # noqa: E731
    else:
        grads = kernels(MODELS[section].scaled(width, layers), seed)
        make = lambda optimizer: update_of(optimizer, grads)  # noqa: E731
    for name, method in tqdm(methods.items(), desc="trace", file=sys.stderr):
        programs[name] = make(method.make(PERIOD, rank))
    compile_all(programs)
    take_turns(programs, rounds, section, seconds)
    rows: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        still, at = split(programs[name].times, method)
        row: dict[str, Any] = {"method": name, "peer": method.peer, "steps": len(still)}
        row |= {"p50": percentile(still, 50), "p99": percentile(still, 99)}
        row |= {"refresh_p50": percentile(at, 50), "refresh_p99": percentile(at, 99)}
        temporaries = programs[name].compiled.memory_analysis().temp_size_in_bytes
        row |= {"refreshes": len(at) or None, "temporaries": temporaries / 1e6}
        rows[name] = row
    for row in rows.values():
        row["over_adamw"] = row["p50"] / rows["optax.adamw"]["p50"]
        if row["peer"] is not None:
            row["over_peer"] = row["p50"] / rows[row["peer"]]["p50"]
    return list(rows.values())


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, tuple(TITLES))
    add = parser.add_argument
    known = _record.names(tuple(METHODS))
    add("--methods", type=known, default=NAMES, help="separated by commas")
    add("--plain", action="store_true", help="without storages and other variants")
    for name in SIZES:
        add(f"--{name}", type=int, help="in place of the preset's")
    add("--seconds", type=float, default=20.0, help="of one program (%(default)s)")
    args = parser.parse_args()
    preset = zip(SIZES, PRESETS[args.preset], strict=True)
    sizes = {name: getattr(args, name) or value for name, value in preset}
    tables = []
    for section in args.only:
        methods = chosen(args.methods, variants=section == "gpt2" and not args.plain)
        rows = measure(section, sizes, args.seconds, methods, args.seed)
        note = ", ".join(f"{name} {value}" for name, value in sizes.items())
        tables.append(_record.Table(TITLES[section], COLUMNS, rows, f"{note}."))
    about = (
        "The programs of a table take turns, in another order every round. *Refresh*: a step that "
        f"refreshes everything, once in {PERIOD} steps. With fewer than a hundred steps the p99 is "
        "about the maximum."
    )
    _record.write(args, "step", "Time of a step", about, tables, sizes | {"seconds": args.seconds})
