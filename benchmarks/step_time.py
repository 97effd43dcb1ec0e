"""Compile time and step time of an optimizer, as ratios to its peer measured in the same run.

    python benchmarks/step_time.py --method muon      # the table below for one method
    python benchmarks/step_time.py --stacking         # from which size on stacking costs time

Trees: *many* is 200 separate matrices of 32×64; *layers* is 12 layers of four 256×256, one 256×1024
and one 1024×256. States are donated, the programs take turns, and medians are shown. `optax` is
`optax.contrib.muon` with the same dtype and iterations; `stack` is a program that only stacks the
leaves by shape and takes them apart again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import curvax

METHODS: dict[str, Callable[..., Any]] = {
    "muon": lambda **kw: curvax.muon(0.02, **kw),
    "racs": lambda **kw: curvax.racs(0.02, output_layer=None, **kw),
    "asgo": lambda **kw: curvax.asgo(0.02, refresh=1000, **kw),
}


def many() -> dict[str, jax.Array]:
    """200 separate matrices of 32×64."""
    return {f"layer_{i:03d}": jnp.full((32, 64), 1.0 + i) for i in range(200)}


def layers(width: int = 256, depth: int = 12) -> dict[str, dict[str, jax.Array]]:
    """The matrices of `depth` transformer layers."""
    key = jax.random.key(0)
    shapes = {f"attention_{i}": (width, width) for i in range(4)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"layer_{i:02d}": {
            name: jax.random.normal(jax.random.fold_in(key, 6 * i + j), shape)
            for j, (name, shape) in enumerate(shapes.items())
        }
        for i in range(depth)
    }


def stack_only() -> optax.GradientTransformation:
    """Stacks all leaves of one shape, multiplies by -1, and takes them apart again."""
    return curvax.on_matrices(optax.scale(-1.0), stack=True)


class Program:
    """An optimizer's update, compiled for a tree of parameters with its state donated."""

    def __init__(self, optimizer: optax.GradientTransformation, params: Any):
        """Compiles the update and takes its time."""
        self.params = params
        self.state = optimizer.init(params)
        # JAX gives donated buffers to outputs of their shape in order: the state comes first.
        update = jax.jit(lambda g, s, p: optimizer.update(g, s, p)[::-1], donate_argnums=1)
        start = time.perf_counter()
        lowered = update.lower(params, self.state, params)
        self.traced = time.perf_counter() - start
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore
        self.times: list[float] = []

    def step(self) -> None:
        """Runs and times one update."""
        start = time.perf_counter()
        self.state, updates = self.compiled(self.params, self.state, self.params)
        jax.block_until_ready(updates)
        self.times.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        """Median of the timed steps, without the first."""
        return 1e3 * statistics.median(self.times[1:])


def take_turns(programs: dict[Any, Program], rounds: int, name: str) -> None:
    """Steps every program once a round, so that noise meets all of them."""
    for _ in tqdm(range(rounds + 1), desc=name, file=sys.stderr):
        for program in programs.values():
            program.step()


def compile_ratios(method: str, repeats: int) -> str:
    """Compile time on the tree *many*."""
    contenders = {
        f"curvax.{method}": METHODS[method],
        "optax.contrib.muon": lambda: optax.contrib.muon(0.02),
        "stack and unstack": stack_only,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(repeats), desc="compile", file=sys.stderr):
        for name, make in contenders.items():
            jax.clear_caches()
            seconds[name].append(Program(make(), many()).compile_seconds)
    best = {name: min(times) for name, times in seconds.items()}
    ours = best[f"curvax.{method}"]
    rows = [f"| {name} | {t:.2f} | {ours / t:.2f} |" for name, t in best.items()]
    head = f"200 matrices of 32×64, best of {repeats} compilations\n\n"
    return head + "\n".join(["| program | compile, s | curvax / this |", "|---|---|---|", *rows])


def step_ratios(method: str, rounds: int) -> str:
    """Step time and temporaries on the tree *layers*, default and forced stacking."""
    programs = {
        f"curvax.{method}": Program(METHODS[method](), layers()),
        f"curvax.{method}, stack=True": Program(METHODS[method](stack=True), layers()),
        "optax.contrib.muon": Program(optax.contrib.muon(0.02), layers()),
    }
    take_turns(programs, rounds, "step")
    ours = programs[f"curvax.{method}"].milliseconds
    rows = [
        f"| {name} | {p.milliseconds:.0f} | {ours / p.milliseconds:.2f} | "
        f"{p.temporaries / 1e6:.0f} | {p.compile_seconds:.2f} |"
        for name, p in programs.items()
    ]
    head = f"12 layers of width 256, median of {rounds} steps, state donated\n\n"
    return head + "\n".join(
        [
            "| program | step, ms | curvax / this | temporaries, MB | compile, s |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def recompilations(method: str) -> str:
    """Calls of the jitted update after the first that compile again."""
    optimizer = METHODS[method]()
    params = layers(width=16, depth=2)
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for _ in range(3):
        _, state = update(params, state, params)
    return f"compilations in three calls: {update._cache_size()}"  # pyright: ignore


def stacking(rounds: int) -> str:
    """Muon's step on 24 square matrices of one size: one stack against one by one."""
    rows = []
    for size in (32, 64, 96, 128, 192, 256, 384):
        params = {f"w{i:02d}": jnp.eye(size) + i for i in range(24)}
        programs = {s: Program(curvax.muon(0.02, stack=s), params) for s in (True, False)}
        take_turns(programs, rounds, f"{size}×{size}")
        stacked, single = programs[True], programs[False]
        rows.append(
            f"| {size} | {stacked.milliseconds:.2f} | {single.milliseconds:.2f} | "
            f"{stacked.milliseconds / single.milliseconds:.2f} | {stacked.compile_seconds:.2f} | "
            f"{single.compile_seconds:.2f} |"
        )
    return "\n".join(
        [
            "| size | stacked, ms | single, ms | ratio | stacked compile, s | single compile, s |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(description="Compile time and step time.")
    parser.add_argument("--method", choices=sorted(METHODS), default="muon")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each program")
    parser.add_argument(
        "--stacking", action="store_true", help="print the sweep over sizes instead"
    )
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, optax {optax.__version__}, {device.device_kind}\n")
    if args.stacking:
        print(stacking(args.rounds))
        return
    print(compile_ratios(args.method, args.repeats))
    print()
    print(step_ratios(args.method, args.rounds))
    print()
    print(recompilations(args.method))


if __name__ == "__main__":
    main()
