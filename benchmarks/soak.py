"""20,000 steps with a fault at 1 % of them: the loss, the counters and the memory in the end.

    python -m benchmarks.soak                          # all of it, about 3 minutes
    python -m benchmarks.soak --methods muon racs      # these only, without writing the page

The network of `benchmarks.faults` learns from another one of its shape: each step draws 32 new
samples, whose outputs have noise of variance 0.09, below which no loss can fall. The learning rate
falls to 0. At 1 % of the steps a random value of `tests/fault_model.py` is in a random element, row
or leaf of the gradients, or in all of them. The run without faults has the same first parameters
and the same batches. It fails, with an exit status, if

* the loss on 65,536 other samples is more than 2 % above that without faults,
* `skipped` is not, for every matrix and every leaf of AdamW's, the number of faults that struck it,
* a chunk of 1,000 steps leaves more bytes of live arrays behind than the first one, or
* the process has grown by more than 1 % from the first chunk of a run to its last.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from .faults import SHAPES, SPEC, loss, machine, outputs, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fault_model import (
    VALUES,
    Cell,
    counters,
    injected,
)

RESULTS = Path(__file__).parent / "results" / "soak.md"
STEPS, CHUNK, PERIOD = 20_000, 1_000, 20
BATCH, EVALUATION = 32, 65_536
SHARE = 0.01
NOISE = 0.3
WITHIN = 0.02
GROWTH = 0.01  # of the process
METHODS = {
    "muon": (Cell("muon"), 0.02),
    "racs": (Cell("racs"), 0.05),
    "soap": (Cell("soap", "every", "dense"), 0.02),
    "shampoo, 4-bit CQ+EF": (Cell("shampoo", "every", "feedback"), 0.02),
    "foam": (Cell("foam", None, "dense"), 0.01),
    "alice": (Cell("alice", "every"), 0.05),
}


def parameters(key: jax.Array) -> dict[str, jax.Array]:
    """Normal numbers of variance 1 over the number of rows."""
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    rows = {name: shape[-2] if len(shape) > 1 else shape[0] for name, shape in SHAPES.items()}
    return {n: jax.random.normal(keys[n], s) / np.sqrt(rows[n]) for n, s in SHAPES.items()}


def batch(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, the teacher's outputs, and their noise."""
    inputs, noise = jax.random.split(key)
    x = jax.random.normal(inputs, (size, SHAPES["in/kernel"][0]))
    y = outputs(parameters(jax.random.key(1)), x)
    return x, y, NOISE * jax.random.normal(noise, y.shape)


def fault(key: jax.Array, share: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Masks of where a random fault is at this step, nowhere at most steps, and its value."""
    happens, which, extent, leaf, *place = jax.random.uniform(key, (7,))
    extent = jnp.floor(4 * extent)  # an element, a row, a leaf, all leaves
    masks = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        at = [
            jax.lax.broadcasted_iota(jnp.int32, shape, axis) == jnp.floor(d * u)
            for axis, d, u in zip(range(len(shape)), shape, place[-len(shape) :], strict=True)
        ]
        row = functools.reduce(jnp.logical_and, at[:-1], jnp.ones(shape, bool))
        own = jnp.where(extent == 0, row & at[-1], row | (extent > 1))
        struck = (jnp.floor(len(SHAPES) * leaf) == i) | (extent == 3)
        masks[name] = own & struck & (happens < share)
    values = jnp.asarray(list(VALUES.values()), jnp.float32)
    return masks, values[jnp.floor(len(VALUES) * which).astype(int)]


class Soak(NamedTuple):
    """What is left of a run."""

    loss: float
    faults: int
    struck: dict[str, np.ndarray]  # faults of each matrix
    skipped: dict[str, np.ndarray]  # what the state counted
    live: list[int]  # bytes of live arrays, after every chunk
    process: list[int]  # bytes of the process, after every chunk
    seconds: float


class Trainer:
    """An optimizer with a compiled chunk of steps, for runs with and without faults."""

    def __init__(self, cell: Cell, rate: float):
        """Compiles at the first run."""
        schedule = optax.linear_schedule(rate, 0.0, STEPS)
        optimizer = cell.make(schedule, PERIOD, weight_dimension_numbers=SPEC)
        self.optimizer = optimizer

        def step(carry: Any, _: Any) -> Any:
            t, share, params, state, struck, faults = carry
            key = jax.random.fold_in(jax.random.key(2), t)
            x, y, noise = batch(key, BATCH)
            masks, value = fault(jax.random.fold_in(key, 1), share)
            gradient = injected(jax.grad(loss)(params, x, y + noise), masks, value)
            updates, state = optimizer.update(gradient, state, params)
            hits = {name: mask.any(axis=_unit(mask)) for name, mask in masks.items()}
            struck = jax.tree.map(lambda n, hit: n + hit, struck, hits)
            faults = faults + jnp.stack([hit.any() for hit in hits.values()]).any()
            return (t + 1, share, optax.apply_updates(params, updates), state, struck, faults), None

        def chunk(carry: Any) -> Any:
            return jax.lax.scan(step, carry, length=CHUNK)[0]

        self.chunk = jax.jit(chunk, donate_argnums=0)

    def run(self, share: float, progress: tqdm) -> Soak:
        """A run with faults at this share of its steps."""
        start = time.perf_counter()
        params = parameters(jax.random.key(0))
        zeros = {name: jnp.zeros(shape[:-2], jnp.int32) for name, shape in SHAPES.items()}
        state = self.optimizer.init(params)
        carry = (jnp.int32(0), jnp.float32(share), params, state, zeros, jnp.int32(0))
        live, process = [], []
        for _ in range(STEPS // CHUNK):
            carry = jax.block_until_ready(self.chunk(carry))
            live.append(sum(x.nbytes for x in jax.live_arrays()))
            process.append(resident())
            progress.update()
        _, _, params, state, struck, faults = carry
        x, y, noise = batch(jax.random.key(3), EVALUATION)
        found = counters(self.optimizer, params)
        return Soak(
            loss=float(loss(params, x, y + noise)),
            faults=int(faults),
            struck={name: np.asarray(n).reshape(-1) for name, n in struck.items()},
            skipped={counter.name: counter.read(state) for counter in found},
            live=live,
            process=process,
            seconds=time.perf_counter() - start,
        )


def _unit(mask: jax.Array) -> tuple[int, ...]:
    return tuple(range(mask.ndim))[-2:]


def resident() -> int:
    """The process's resident memory, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def failures(clean: Soak, faulty: Soak) -> list[str]:
    """What is not as it should be."""
    found = []
    if not faulty.loss <= (1 + WITHIN) * clean.loss:
        found.append(f"the loss is {faulty.loss:.4f} with faults, {clean.loss:.4f} without")
    for run in (clean, faulty):
        if any((run.skipped[name] != n).any() for name, n in run.struck.items()):
            found.append(f"counted {run.skipped}, struck {run.struck}")
        if max(run.live) > run.live[0]:
            found.append(f"live arrays took {run.live} bytes")
        if run.process[-1] > (1 + GROWTH) * run.process[0]:
            found.append(f"the process took {run.process} bytes")
    return found


def row(name: str, cell: Cell, rate: float, clean: Soak, faulty: Soak, floor: float) -> list[str]:
    """A line of the table."""
    struck = sum(int(n.sum()) for n in faulty.struck.values())
    skipped = sum(int(n.sum()) for n in faulty.skipped.values())
    grown = (faulty.process[-1] - faulty.process[0]) / 2**20
    return [
        name,
        f"{rate:g}",
        f"{clean.loss:.5f}",
        f"{faulty.loss:.5f}",
        f"{100 * (faulty.loss / clean.loss - 1):+.2f} %",
        f"{clean.loss - floor:.5f}",
        f"{faulty.loss - floor:.5f}",
        str(faulty.faults),
        f"{struck} / {skipped}",
        f"{faulty.live[0]:,} / {faulty.live[-1]:,}",
        f"{grown:+.1f} of {faulty.process[0] / 2**20:.0f}",
    ]


def main() -> None:
    """Prints the page, and writes it if it has all methods."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD"
    )
    args = parser.parse_args()
    x, y, noise = batch(jax.random.key(3), EVALUATION)
    first = float(loss(parameters(jax.random.key(0)), x, y + noise))
    floor = float(jnp.mean(jnp.square(noise)))
    del x, y, noise
    start, rows, wrong = time.perf_counter(), [], []
    total = 2 * len(args.methods) * (STEPS // CHUNK)
    with tqdm(total=total, unit="chunk", file=sys.stderr) as progress:
        for name in args.methods:
            trainer = Trainer(*METHODS[name])
            clean, faulty = (trainer.run(share, progress) for share in (0.0, SHARE))
            rows.append(row(name, *METHODS[name], clean, faulty, floor))
            wrong += [f"{name}: {what}" for what in failures(clean, faulty)]
            jax.clear_caches()
    titles = ("method", "rate", "loss", "with faults", "change", "above the noise", "with faults")
    counts = ("faults", "struck / skipped", "live bytes, first / last", "process, MB")
    text = "\n\n".join(
        [
            "# A soak: 20,000 steps, faults at 1 % of them",
            f"A network of {sum(int(np.prod(s)) for s in SHAPES.values())} parameters, trained on "
            f"32 new samples a step. The loss on {EVALUATION:,} other samples is {first:.2f} at "
            f"first and cannot fall below the noise, {floor:.5f}. Runs with and without faults "
            "have the same batches. *Struck / skipped*: the number of gradients of a matrix or "
            "leaf with a fault, and the number that the state counted. *Live bytes*: of all JAX "
            "arrays, after the first 1,000 steps and after the last. *Process*: how much its "
            "resident memory grew in between.",
            table([*titles, *counts], rows),
            "\n".join(f"* {what}" for what in wrong) or "All checks passed.",
            f"`{shlex.join(['python', '-m', 'benchmarks.soak', *sys.argv[1:]])}`, "
            f"{time.perf_counter() - start:.0f} seconds, {machine()}.",
        ]
    )
    print(text)
    if args.methods == list(METHODS):
        RESULTS.write_text(text + "\n")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
