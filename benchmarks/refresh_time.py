"""What refreshes cost: checks that refresh nothing, staggering, memory, and finding subspaces.

    python -m benchmarks refresh                           # all tables, about five minutes
    python -m benchmarks refresh --only checks,stagger

*Checks*: FOAM's and DR-Shampoo's, that leave everything as it is, beside three products of the
factor's order and an eigendecomposition. *Stagger*: consecutive steps of Shampoo, its refreshes
together and spread over the period. *Memory*: temporaries of a step with a refresh. *Finders*: the
randomized range finder beside the exact decomposition, and the energy that its subspace holds.

States are donated and the programs of a table take turns. Steps between refreshes are in
`python -m benchmarks step`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax
from curvax import subspaces

from . import _record
from ._timing import Program, percentile, take_turns

SECTIONS = ("checks", "stagger", "memory", "finders")
# Order of a factor; m, n and rank of the finders' matrix.
PRESETS = {"cpu": (512, 1024, 4096, 128), "gpu": (2048, 4096, 11008, 512)}

TIMES = {"program": ("program", ""), "ms": ("ms", ".1f"), "ratio": ("ratio", ".2f")}
STAGGER = {
    "staggered": ("staggered", ""),
    "median": ("median, ms", ".1f"),
    "p99": ("p99, ms", ".1f"),
    "ratio": ("ratio", ".2f"),
    "refreshes": ("refreshes", "d"),
}
MEMORY = {
    "policy": ("policy", ""),
    "matrices": ("matrices", "d"),
    "temporaries": ("temporaries, MB", ".1f"),
    "beyond": ("beyond a batch, matrices", ".1f"),
}
FINDERS = {
    "basis": ("basis", ""),
    "ms": ("ms", ".0f"),
    "ratio": ("ratio", ".3f"),
    "energy_1": ("energy, σ_i = 1/i", ".5f"),
    "energy_half": ("energy, 1/√i", ".5f"),
}


def started(transform: Any, grads: Any) -> Program:
    """A transformation after its first step, in which everything is refreshed."""
    _, state = jax.jit(transform.update)(grads, transform.init(grads))
    return Program(lambda state, grads: transform.update(grads, state)[::-1], state, grads)


def measured(programs: dict[str, Program], rounds: int, name: str) -> list[dict[str, Any]]:
    """Median times, and their ratios to the first program's."""
    take_turns(programs, rounds, name)
    first = next(iter(programs.values())).median
    return [{"program": n, "ms": p.median, "ratio": p.median / first} for n, p in programs.items()]


def checks(rounds: int, order: int, seed: int, count: int = 4) -> _record.Table:
    """A check that refreshes nothing, beside three products of its order and a decomposition."""
    factors = jax.random.normal(jax.random.key(seed), (count, order, 2 * order))
    factors = factors @ factors.mT / (2 * order)

    def products(state: Any, factors: jax.Array) -> Any:
        return state, jax.lax.map(lambda x: (x @ x) @ x @ x, factors)

    def decompositions(state: Any, factors: jax.Array) -> Any:
        return state, jax.lax.map(jnp.linalg.eigh, factors)

    def check(policy: Any) -> Program:
        # One side, one matrix a factor: statistics never due, so that checks are all that happens.
        transform = curvax.precondition(
            refresh=policy, side="left", root=2, b2=0.0, eps=1e-9, statistics_every=2
        )
        thin = {"w": jnp.linalg.cholesky(factors)[..., : max(1, order // 64)]}
        state = transform.init(thin)
        _, state = jax.jit(transform.update)(thin, state)
        full = state.left["w"]._replace(statistic=factors)
        state = state._replace(left={"w": full})
        _, state = jax.jit(transform.update)(thin, state._replace(count=jnp.int32(0)))
        # From here on the count stays where a check is due and statistics are not.
        fixed = jnp.int32(2)

        def step(state: Any, grads: Any) -> Any:
            return transform.update(grads, state._replace(count=fixed))[::-1]

        # What is donated must be its own: here `factors` is still everybody's.
        return Program(step, jax.tree.map(jnp.copy, state), thin)

    programs = {
        "three products": Program(products, jnp.zeros(()), factors),
        "FOAM check, nothing refreshed": check(curvax.policies.foam(1, float("inf"), 1.0)),
        "DR check, nothing refreshed": check(curvax.policies.diagonal_residual(1, 1e9)),
        "eigendecomposition": Program(decompositions, jnp.zeros(()), factors),
    }
    title = f"Checks of {count} factors of order {order}"
    return _record.Table(title, TIMES, measured(programs, rounds, "checks"))


def stagger(steps: int, order: int, seed: int, period: int = 50, count: int = 64) -> _record.Table:
    """Step times of Shampoo with its refreshes together and staggered."""
    keys = jax.random.split(jax.random.key(seed), count)
    grads = {f"w{i:02d}": jax.random.normal(key, (order, 64)) for i, key in enumerate(keys)}
    rows = []
    for staggered in (False, True):
        policy = curvax.every(period, offset=1, stagger=staggered)
        transform = curvax.on_matrices(
            curvax.precondition(refresh=policy, side="left", root=4, eps=1e-6)
        )
        program = started(transform, grads)
        for _ in tqdm(range(steps), desc=f"stagger={staggered}", file=sys.stderr):
            program.run()
        median, p99 = (percentile(program.times, q) or 0.0 for q in (50, 99))
        counts = [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(program.state)
            if jax.tree_util.GetAttrKey("refreshes") in path
        ]
        row = {"staggered": "yes" if staggered else "no", "median": median, "p99": p99}
        row |= {"ratio": p99 / median, "refreshes": sum(int(x.sum()) for x in counts)}
        rows.append(row)
    title = f"{count} factors of order {order}, a refresh every {period} of {steps} steps"
    return _record.Table(title, STAGGER, rows, "The ratio is p99 to median.")


def memory(order: int) -> _record.Table:
    """Temporaries of a step with a refresh, for few and many matrices of one shape."""
    rows = []
    for count in (4, 32):
        grads = {"stack": jax.ShapeDtypeStruct((count, order, order), jnp.float32)}
        for name, policy in {
            "every": curvax.every(10),
            "foam": curvax.policies.foam(10),
            "diagonal_residual": curvax.policies.diagonal_residual(10),
        }.items():
            transform = curvax.precondition(refresh=policy, root=2, eps=1e-9)
            step = jax.jit(
                lambda state, grads, t=transform: t.update(grads, state)[::-1], donate_argnums=0
            )
            lowered = step.lower(jax.eval_shape(transform.init, grads), grads)
            sizes: Any = lowered.compile().memory_analysis()
            temporaries, one = sizes.temp_size_in_bytes, 4 * order**2
            row = {"policy": name, "matrices": count, "temporaries": temporaries / 1e6}
            # Products of the whole batch, for its statistics and directions, are as large as it.
            rows.append(row | {"beyond": temporaries / one - count})
    return _record.Table(f"Temporaries of a step, matrices of order {order}", MEMORY, rows)


def finders(rounds: int, m: int, n: int, rank: int, seed: int) -> _record.Table:
    """The randomized range finder against the exact decomposition."""
    generator = np.random.default_rng(seed)
    left = np.linalg.qr(generator.standard_normal((m, m)))[0]
    right = np.linalg.qr(generator.standard_normal((n, m)))[0]
    bases = {"svd": subspaces.svd(), "randomized": subspaces.randomized()}
    spectra = {
        name: jnp.asarray((left * np.arange(1, m + 1) ** -power) @ right.T, "float32")
        for name, power in (("energy_1", 1.0), ("energy_half", 0.5))
    }

    def find(name: str) -> Any:
        def one(g: jax.Array) -> jax.Array:
            check = subspaces.SubspaceCheck(
                g, g[:, :rank], None, None, jnp.bool_(True), jax.random.key(seed)
            )
            return bases[name].find(check, rank)

        return jax.jit(one)

    programs = {name: find(name) for name in bases}
    times: dict[str, list[float]] = {name: [] for name in bases}
    found: dict[tuple[str, str], Any] = {}
    for i in tqdm(range(rounds + 1), desc="finders", file=sys.stderr):
        for name, program in programs.items():
            for spectrum, g in spectra.items():
                start = time.perf_counter()
                found[name, spectrum] = jax.block_until_ready(program(g))
                if i:
                    times[name].append(1e3 * (time.perf_counter() - start))
    rows = []
    for name in bases:
        ms = percentile(times[name], 50) or 0.0
        row: dict[str, Any] = {"basis": name, "ms": ms}
        row["ratio"] = ms / (percentile(times["svd"], 50) or 1.0)
        for spectrum, g in spectra.items():
            energy = [float(jnp.sum((found[key, spectrum].T @ g) ** 2)) for key in (name, "svd")]
            row[spectrum] = energy[0] / energy[1]
        rows.append(row)
    title = f"Subspaces of rank {rank} of {m}×{n}"
    return _record.Table(
        title, FINDERS, rows, "Energy: of G in the subspace, over that in the exact one."
    )


def draw(tables: list[_record.Table]) -> Figure:
    """A panel of bars for every table."""
    wide, high = min(4, len(tables)), -(-len(tables) // 4)
    figure = Figure(figsize=(4.2 * wide, 3.2 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False).flat
    for axis in panels[len(tables) :]:
        axis.set_axis_off()
    for axis, table in zip(panels, tables, strict=False):
        first, *keys = table.columns
        shown = [key for key in ("median", "p99", "ms", "temporaries", "bytes") if key in keys]
        told = [first, *(k for k in ("matrices", "order", "layout", "statistics") if k in keys)]
        names = [", ".join(str(row[key]) for key in told) for row in table.rows]
        y = np.arange(len(names))
        for i, key in enumerate(shown):
            values = [row[key] for row in table.rows]
            label = table.columns[key][0]
            axis.barh(y + 0.4 * i, values, 0.4, color=_record.COLORS[i], label=label)
        axis.set_yticks(y + 0.2 * (len(shown) - 1), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_ylabel(", ".join(table.columns[key][0] for key in told), fontsize=8)
        axis.set(xlabel=table.columns[shown[0]][0].rpartition(", ")[2])
        axis.set_title(table.title, fontsize=8, loc="right")
        if len(shown) > 1:
            axis.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="of checks; a seventh of finders (%(default)s)")
    add("--steps", type=int, default=200, help="of stagger (%(default)s)")
    add("--order", type=int, help="of factors, in place of the preset's")
    args = parser.parse_args()
    order, m, n, rank = PRESETS[args.preset]
    if args.order is not None:
        order, m, n, rank = args.order, 2 * args.order, 8 * args.order, max(1, args.order // 4)
    makers: dict[str, Callable[[], _record.Table]] = {
        "checks": functools.partial(checks, args.rounds, order, args.seed),
        "stagger": functools.partial(stagger, args.steps, order, args.seed),
        "memory": functools.partial(memory, max(1, order // 2)),
        "finders": functools.partial(finders, max(1, args.rounds // 7), m, n, rank, args.seed),
    }
    tables = [makers[name]() for name in args.only]
    about = "Medians, state donated; the programs of a table take turns."
    settings = {"rounds": args.rounds, "steps": args.steps, "order": order}
    _record.write(args, "refresh", "What refreshes cost", about, tables, draw(tables), settings)


if __name__ == "__main__":
    main()
