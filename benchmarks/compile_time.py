"""Seconds of tracing and compiling an update, against the number of leaves and of shapes.

    python -m benchmarks compile                        # all methods, about 20 minutes
    python -m benchmarks compile --methods muon,soap --only leaves

Leaves are separate matrices of 32×64, or so many shapes from 32×64 to 32×94. *stack and unstack* is
what one would write first: `jnp.stack` of the leaves of a shape, negated, and an index for each of
them, for which XLA compiles a slice each. Programs take turns, caches are cleared before each
compilation, and the best is shown. Aims are for 400 leaves: 0.35 times `optax.contrib.muon`, 1.25
times stacking alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from . import _record
from ._methods import NAMES, chosen
from ._timing import ratio, update_of
from ._trees import many

SECTIONS = ("leaves", "shapes")
LEAVES, SHAPES, LEAVES_OF_SHAPES = (1, 10, 100, 400), (1, 4, 16), 48
RANK = 8
STACKING, PEER = "stack and unstack", "optax.contrib.muon"
AIMS = {STACKING: 1.25, PEER: 0.35}


def programs(families: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """What is compiled."""
    methods = chosen(families, variants=False) | chosen(("muon",), variants=False)
    made = {name: lambda m=m: m.make(10, RANK) for name, m in methods.items()}
    made = {name: make for name, make in made.items() if "." in name or name in families}
    return {STACKING: lambda: optax.stateless(stack_and_unstack), **made}


def stack_and_unstack(updates: Any, _: Any) -> dict[str, jax.Array]:
    """The leaves of a dict with the other sign, by way of stacks of one shape."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, x in updates.items():
        names.setdefault(x.shape, []).append(name)
    stacks = {shape: -jnp.stack([updates[name] for name in own]) for shape, own in names.items()}
    return {name: stacks[shape][i] for shape, own in names.items() for i, name in enumerate(own)}


def compilations(optimizer: Any, grads: Any) -> int:
    """How often three calls of a jitted update compile."""
    update, state = jax.jit(optimizer.update), optimizer.init(grads)
    for _ in range(3):
        _, state = update(grads, state, grads)
    return update._cache_size()  # pyright: ignore


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Programs that an earlier process compiled are not loaded."""
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)


def measure(
    making: dict[str, Callable[[], Any]], trees: dict[int, Any], repeats: int, aims: bool
) -> list[dict[str, Any]]:
    """A row for every program, with its best times on every tree."""
    best: dict[tuple[str, int], float] = {}
    traced: dict[tuple[str, int], float] = {}
    started: dict[tuple[str, int], float] = {}
    rounds = [(name, size) for _ in range(repeats) for size in trees for name in making]
    with without_cache():
        for name, size in tqdm(rounds, desc="compile", file=sys.stderr):
            jax.clear_caches()
            program = update_of(making[name](), trees[size])
            if program.compile_seconds < best.get((name, size), float("inf")):
                best[name, size] = program.compile_seconds
                traced[name, size] = program.trace_seconds
                started[name, size] = program.init_seconds
    most, rows = max(trees), []
    for name in making:
        row: dict[str, Any] = {"program": name}
        row |= {str(size): best[name, size] for size in trees}
        row["traced"], row["init"] = traced[name, most], started[name, most]
        row["compilations"] = compilations(making[name](), trees[min(trees)])
        for other, bound in AIMS.items():
            row[f"over {other}"] = over = ratio(best[name, most], best.get((other, most)))
            if aims and over is not None and name in NAMES:
                row[f"aim, {other}"] = _record.verdict(over, bound)
        rows.append(row)
    return rows


def columns(trees: dict[int, Any], counted: str, aims: bool) -> dict[str, tuple[str, str]]:
    """Headings."""
    most = max(trees)
    found = {"program": ("program", "")}
    found |= {str(size): (f"{size} {counted}, s", ".2f") for size in trees}
    found["traced"] = (f"tracing of {most}, s", ".2f")
    found["init"] = (f"init of {most}, s", ".2f")
    for other in AIMS:
        found[f"over {other}"] = (f"over {other}", ".2f")
        if aims:
            found[f"aim, {other}"] = ("aim", "")
    return found | {"compilations": ("compilations in 3 calls", "d")}


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    add = parser.add_argument
    add("--methods", type=_record.names(NAMES), default=NAMES, help="separated by commas")
    add("--most", type=int, default=max(LEAVES), help="leaves at most (%(default)s)")
    add("--repeats", type=int, default=2, help="compilations of each (%(default)s)")
    args = parser.parse_args()
    making = programs(args.methods)
    tables = []
    if "leaves" in args.only:
        trees = {n: many(n) for n in sorted({*LEAVES, args.most}) if n <= args.most}
        held = args.most >= max(LEAVES)
        rows = measure(making, trees, args.repeats, held)
        title = "Leaves of one shape"
        tables.append(_record.Table(title, columns(trees, "leaves", held), rows))
    if "shapes" in args.only:
        leaves = min(LEAVES_OF_SHAPES, args.most)
        trees = {n: many(leaves, n) for n in SHAPES if n <= leaves}
        rows = measure(making, trees, args.repeats, False)
        title = f"Distinct shapes of {leaves} leaves"
        tables.append(_record.Table(title, columns(trees, "shapes", False), rows))
    about = (
        "Seconds to trace and compile a jitted update: the best of "
        f"{args.repeats} compilations, with the programs in turns. *Stack and unstack* only stacks "
        "the leaves by shape and splits the stacks again, with `jnp.stack` and indices. *Init*: "
        "the same for the program that makes the state. Ratios and aims are for the largest number "
        "of leaves or shapes."
    )
    settings = {"most": args.most, "repeats": args.repeats, "rank": RANK}
    _record.write(args, "compile", "Time of compilation", about, tables, settings)


if __name__ == "__main__":
    main()
