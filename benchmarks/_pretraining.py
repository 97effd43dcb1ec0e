"""LLaMA as Gong et al. (arXiv:2502.07752, section F.2) train it, on the tokens of `corpus`.

RMSNorm, whose scales are left to the kernels behind it, SwiGLU, rotary positions, the widths of
Table 10, 32,000 symbols, sequences of 256; a warm-up of 10 % of the steps, then a cosine to 10 %;
no weight decay. Weights and states are in float32, products in bfloat16 (on a CPU in float32).
Kernels of attention and MLP, stacked over the layers, go to the method, embedding and head to
AdamW at AdamW's best rate. Periods are the paper's for 10,000 steps where they fit, else a fifth of
the run. Windows do not overlap and come in random order, each once before any comes twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from . import _llama
from ._training import Program, Task, load, save
from ._trees import Shapes
from .corpus import PLACE
from .evidence._adapters import with_adapters
from .evidence._language import windows_of

KEPT = Path("runs", "gpu")  # the parameters that fine-tuning starts from
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s of products in bfloat16


class Size(NamedTuple):
    """A model and how it is trained."""

    shapes: Shapes
    steps: int
    batch: int = 128
    context: int = 256
    rank: int = 128
    leading: int = 40  # of Alice's rank
    evaluations: int = 20

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context

    @property
    def flops(self) -> int:
        """The FLOPs of a step's products: 6 for each number of kernels and head, and those of
        attention."""
        shapes = self.shapes
        numbers = shapes.parameters - shapes.vocabulary * shapes.width
        return self.tokens * (6 * numbers + 12 * shapes.layers * shapes.width * self.context)


SIZES = {
    "60M": Size(_llama.SIZES["60M"], 1000),
    "130M": Size(_llama.SIZES["130M"], 500, rank=256),
    # The smallest of Marin's benchmark, in windows of 1024 in place of 4096: 33 million tokens.
    "Marin 130M": Size(Shapes(512, 1792, 6, 32000), 250, context=1024, evaluations=10),
    "Marin 2M": Size(Shapes(128, 448, 2, 4096), 40, 8, 64, evaluations=4),
    "2M": Size(Shapes(128, 344, 4, 4096), 150, 8, 64, 32, 10, 10),  # 1/30, for two cores
}
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (2e-3, 1e-3, 4e-3),
    "muon": (0.032, 0.016, 0.064),
    "soap": (0.0025, 0.005, 0.01),
    "racs": (0.04, 0.02, 0.01),
    "alice": (0.02, 0.01, 0.04),
    "shampoo": (1e-3, 5e-4, 2e-3),
}  # the best at the size 2M comes first
MARIN = {
    "muon_decayed": (0.016, 0.0032),
    "muon_h": (0.02, 0.0046),
    "soap": (0.01, 0.0032),
    "kl_soap_h": (0.014, 0.0046),
}
"""Rates of matrices and of others: Marin's (`docs/published.md`), `soap`'s as in start.md, and
KL-SOAP-H's 0.7 of MuonH's, as Marin has it for mixtures of experts."""
FINETUNED: dict[str, tuple[float, ...]] = {
    "adamw": (1e-4, 3e-4),
    "lora": (1e-3, 3e-3),
    "galore": (2e-3, 6e-3),
    "sumo": (2e-3, 6e-3),
    "muon": (2e-3, 6e-3),
    "alice": (2e-3, 6e-3),
}
LORA_RANK = 8


@functools.cache
def text(kind: str, vocabulary: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Tokens to learn from, tokens held out, and their digest; rare ones are one symbol."""
    with np.load(PLACE) as stored:
        found = [stored[f"{kind}_{part}"] for part in ("train", "held_out")]
        digest = json.loads(str(stored["about"]))["digest"]
    train, held_out = (np.minimum(x, vocabulary - 1) for x in found)
    return train, held_out, digest


def starts_of(length: int, size: Size, seed: int) -> jax.Array:
    """Where the windows of each step start, `(steps, batch)`."""
    number, needed = (length - 1) // size.context, size.steps * size.batch
    draws = np.random.default_rng(seed)
    order = np.concatenate([draws.permutation(number) for _ in range(-(-needed // number))])
    return jnp.asarray(size.context * order[:needed].reshape(size.steps, size.batch), jnp.int32)


@functools.cache
def pretraining(size: Size, kind: str = "prose") -> Task:
    """A model of this size on text of a kind."""
    train, held_out, digest = text(kind, size.shapes.vocabulary)
    windows = windows_of(held_out, size.context, 4 * size.batch)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    like = _llama.parameters(size.shapes, jnp.float32)

    def params(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(like)
        keys = jax.random.split(key, len(leaves))
        drawn = (jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
        return jax.tree.unflatten(tree, [0.02 * x for x in drawn])

    def loss_on(params: Any, windows: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda x: x.astype(dtype), params)
        tokens = windows.astype(jnp.int32)
        each = functools.partial(jax.vmap, in_axes=(None, 0))
        x = _llama.embed(p["embed"], tokens[:, :-1])
        x, _ = jax.lax.scan(lambda x, p: (each(_llama.block)(p, x), None), x, p["layers"])
        return _llama.loss(p["head"], x, tokens[:, 1:])

    def evaluate(params: Any) -> jax.Array:
        parts = windows.reshape(4, size.batch, size.context + 1)
        return jax.lax.map(lambda part: loss_on(params, part), parts).mean()

    places = jnp.arange(size.context + 1)
    return Task(
        sizes={"steps": size.steps, "tokens": size.tokens, "text": digest},
        data=jnp.asarray(train),
        params=jax.jit(params),
        batches=lambda seed: starts_of(len(train), size, seed),
        loss_of=lambda params, data, starts: loss_on(params, data[starts[:, None] + places]),
        evaluate=jax.jit(evaluate),
        evaluations=size.evaluations,
    )


def finetuning(size: Size, before: Any, lora: bool) -> Task:
    """From parameters that have read prose to code; tested on prose."""
    prose = pretraining(size)
    task = dataclasses.replace(
        pretraining(size, "code"),
        params=lambda key: jax.tree.map(jnp.copy, before),
        test=lambda params: {"prose": prose.evaluate(params)},
    )
    return with_adapters(task, LORA_RANK) if lora else task


def optimizer(name: str, size: Size, values: Mapping[str, Any]) -> optax.GradientTransformation:
    """A method with peak rates `rate`, and `adam_rate` for all other parameters."""
    warmup = max(1, size.steps // 10)
    share = optax.warmup_cosine_decay_schedule(
        1 / warmup, 1.0, warmup, max(size.steps, warmup + 1), end_value=0.1
    )
    scheduled = lambda peak: lambda count: peak * share(count)  # noqa: E731
    rate = scheduled(values["rate"])
    if name in ("adamw", "lora"):
        return optax.adamw(rate, weight_decay=0.0)
    own: dict[str, Any] = {
        "matrices": "layers/*/kernel",
        "weight_dimension_numbers": {"layers/*/kernel": curvax.MatrixAxes(rows=1, columns=2)},
        "others": optax.adamw(scheduled(values["adam_rate"]), weight_decay=0.0),
    }
    low_rank = {"rank": size.rank, "refresh": max(1, min(200, size.steps // 5)), **own}
    switching = curvax.subspaces.complement(size.leading)
    base = functools.partial(optax.adamw, weight_decay=0.0)
    made: dict[str, Callable[[], Any]] = {
        "muon": lambda: curvax.muon(rate, **own),
        "muon_decayed": lambda: curvax.muon(
            rate, accumulate="sum", weights=curvax.weights.decay(0.1), **own
        ),
        "muon_h": lambda: curvax.muon(rate, accumulate="sum", weights="hyperball", **own),
        "soap": lambda: curvax.soap(rate, method="rotations", refresh=10, **own),
        "kl_soap_h": lambda: curvax.soap(
            rate, statistics="kl", method="rotations", refresh=8, weights="hyperball", **own
        ),
        "racs": lambda: curvax.racs(rate, **own),
        "alice": lambda: curvax.alice(rate, switching=switching, **low_rank),
        "shampoo": lambda: curvax.shampoo(
            rate, base=base, statistics_every=1, refresh=max(1, size.steps // 50), **own
        ),
        "galore": lambda: curvax.galore(rate, **low_rank),
        "sumo": lambda: curvax.sumo(rate, **low_rank),
    }
    return made[name]()


class Trainer:
    """Trains, with every program compiled once, those that are waiting all together."""

    def __init__(self) -> None:
        """Has compiled nothing yet."""
        self.programs: dict[Any, Program] = {}
        self.bases: dict[tuple[str, float], Any] = {}

    def program(self, method: str, name: str, steps: int, base: float | None = None) -> Program:
        """That of a method and a size, for so many steps; fine-tuning from AdamW at a rate."""
        key = method, name, steps, base
        if key not in self.programs:
            size = SIZES[name]._replace(steps=steps)
            if base is None:
                task = pretraining(size)
            else:
                size = size._replace(batch=max(1, size.batch // 4), evaluations=8)
                if (name, base) not in self.bases:
                    self.bases[name, base] = self.before(name, base)
                task = finetuning(size, self.bases[name, base], method == "lora")
            make = functools.partial(optimizer, method, size)
            self.programs[key] = Program(make, task, scanned=True)
        return self.programs[key]

    def warm(self, programs: Sequence[Program]) -> float:
        """Compiles programs in threads; the seconds that it took."""
        begin = time.perf_counter()
        rates = {"rate": jnp.zeros(()), "adam_rate": jnp.zeros(())}

        def compiled(program: Program) -> None:
            state = jax.eval_shape(program.start, rates, jax.random.key(0))
            program.compile(state, program.task.data, program.task.batches(0), rates)

        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            list(pool.map(compiled, programs))
        return time.perf_counter() - begin

    def before(self, name: str, rate: float) -> Any:
        """AdamW's model of a size: the best that is kept, else one at this rate."""
        if not (kept := sorted(KEPT.glob(f"{name}-*.npz"), key=lambda x: x.stem[-6:])):
            program = self.program("adamw", name, SIZES[name].steps)
            found = program.train({"rate": rate, "adam_rate": rate}, 0, last=True)
            kept = [self.keep(name, program, found)]
        return load(kept[0], _llama.parameters(SIZES[name].shapes))

    def keep(self, name: str, program: Program, found: Mapping[str, Any]) -> Path:
        """Where the parameters at the end of a run are from now on."""
        path = KEPT / f"{name}-{found['loss']:.4f}.npz"
        save(path, program.params)
        return path

    def line(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a run: its losses, and its speed."""
        name, *how = (job[key] for key in ("size", "steps", "base"))
        programs = {x: self.program(x, name, *how) for x in (*job["waiting"], job["method"])}
        warming = self.warm([x for x in programs.values() if x.compiled is None])
        program = programs[job["method"]]
        values = {"rate": job["rate"], "adam_rate": job["adam_rate"]}
        found = program.train(values, job["seed"], last=False)
        if found["loss"] and job["method"] == "adamw" and how == [SIZES[name].steps, None]:
            self.keep(name, program, found)
        tokens = program.task.sizes["tokens"]
        second = tokens * found["steps"][-1] / sum(found["seconds"])  # tokens of one
        kind = jax.devices()[0].device_kind
        peak = next((x for card, x in PEAKS.items() if card in kind), None)
        flops = SIZES[name].flops / SIZES[name].tokens * second
        return found | {
            "tokens": tokens,
            "tokens_per_second": round(second),
            "mfu": flops / peak if peak and job["base"] is None else None,
            "warming_seconds": round(warming, 1),
            "text": program.task.sizes["text"],
        }
