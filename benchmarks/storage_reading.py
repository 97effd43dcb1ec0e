"""What storages add to the products of a step: reading bases, and renewing statistics.

    python -m benchmarks reading                          # both tables, some minutes
    python -m benchmarks reading --only bases --orders 512,1024

Programs of an order take turns, and each ratio is the median over rounds of the time beside that of
float32 in the same round. On CPUs it is the processor time of all threads, to which other processes
add less than to the time on the wall. *Bases*: the four rotations of SOAP's step, into the bases of
both sides and back. With its statistics the step has half as many products again; the aim for what
reading adds is a quarter of all of them, from order 512 on. *Statistics*: decoding one, adding a
gradient's Gram matrix, encoding it; the aim is 1.5 times the same in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import curvax
from curvax.transforms._side import LEFT, Side
from curvax.transforms.kronecker._statistic import StatisticRule

from . import _record
from ._timing import Program, take_turns
from .storage_time import STORAGES

SECTIONS = ("bases", "statistics")
ORDERS = {"cpu": (128, 256, 512, 1024), "gpu": (512, 1024, 2048, 4096)}
WIDE = 4  # columns for each row, of the gradients that are not square
ADDED, RENEWED = 0.25, 1.5  # aims
BASES: dict[str, Any] = {
    "float32": curvax.packed(bases=curvax.dense()),
    "packed": curvax.packed(),
    "packed, bases in squares": curvax.packed(bases=curvax.quantized(8)),
    "packed, bases in bfloat16": curvax.packed(bases=curvax.dense(jnp.bfloat16)),
}
READING = {
    "shape": ("gradient", ""),
    "storage": ("bases", ""),
    "bytes": ("bytes of the bases / (m² + n²)", ".2f"),
    "ms": ("ms", ".2f"),
    "ratio": ("over float32's rotations", ".2f"),
    "added": ("added / SOAP's products", ".2f"),
}
RENEWING = {
    "order": ("order", "d"),
    "storage": ("storage", ""),
    "ms": ("ms", ".2f"),
    "ratio": ("over float32", ".2f"),
}


class Held(NamedTuple):
    """What has a statistic."""

    statistic: Any


class Counted(Program):
    """A compiled step, in processor time on CPUs."""

    def run(self) -> None:
        """One step, timed in milliseconds."""
        clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
        start = clock()
        self.state, result = self.compiled(self.state, *self.given)
        jax.block_until_ready((self.state, result))
        self.times.append(1e3 * (clock() - start))


def timed(programs: dict[str, Program], rounds: int, name: str) -> list[dict[str, Any]]:
    """Median times, and the medians of the ratios to the first program in the same round."""
    take_turns(programs, rounds, name)
    first = np.asarray(next(iter(programs.values())).times[1:])
    return [
        {"storage": n, "ms": p.median, "ratio": float(np.median(np.asarray(p.times[1:]) / first))}
        for n, p in programs.items()
    ]


def reading(rounds: int, shape: tuple[int, int], seed: int) -> list[dict[str, Any]]:
    """Rotations of one gradient into stored bases and back."""
    keys = jax.random.split(jax.random.key(seed), 3)
    g = jax.random.normal(keys[0], shape)
    bases = [jax.random.orthogonal(key, n) for key, n in zip(keys[1:], shape, strict=True)]
    programs, sizes = {}, {}
    for name, storage in BASES.items():

        @jax.jit
        def encode(bases: Any, storage: Any = storage) -> Any:
            return [storage.encode_basis(u, storage.encode_basis(u, None)) for u in bases]

        def step(x: jax.Array, stored: Any, storage: Any = storage) -> Any:
            opened = [
                storage.open_basis(u, side.other.order(x))
                for side, u in zip(Side, stored, strict=True)
            ]
            for back in (False, True):
                for side, u in zip(Side, opened, strict=True):
                    x = storage.rotate(u, x, side, back)
            return x, ()

        stored = encode(bases)
        sizes[name] = sum(x.nbytes for x in jax.tree.leaves(stored)) / sum(n * n for n in shape)
        programs[name] = Counted(step, jnp.copy(g), stored)
    rows = timed(programs, rounds, f"bases {shape}")
    for row in rows:
        row |= {"shape": "×".join(map(str, shape)), "bytes": sizes[row["storage"]]}
        row["added"] = (row["ratio"] - 1) * 2 / 3
    return rows


def renewing(rounds: int, order: int, seed: int) -> list[dict[str, Any]]:
    """A statistic after a step with a square gradient."""
    g = jax.random.normal(jax.random.key(seed), (1, order, order))
    programs = {}
    for name, storage in STORAGES.items():
        rule = StatisticRule(storage, 0.95)

        def step(held: Held, g: jax.Array, count: jax.Array, rule: Any = rule) -> Any:
            return rule.accumulated(held, g, LEFT, count), ()

        @jax.jit
        def start(g: jax.Array, storage: Any = storage) -> Held:
            first = storage.encode_factor(0 * g + jnp.eye(order), None)
            return Held(storage.encode_factor(g @ g.mT, first))

        programs[name] = Counted(step, start(g), g, jnp.int32(1))
    return [{"order": order, **row} for row in timed(programs, rounds, f"statistics {order}")]


def figure_of(tables: list[_record.Table]) -> Figure:
    """Ratios of each program."""
    figure = Figure(figsize=(6.5 * len(tables), 4), layout="constrained")
    for axis, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        names = [f"{row.get('shape', row.get('order'))} {row['storage']}" for row in table.rows]
        axis.barh(names, [row["ratio"] for row in table.rows])
        axis.invert_yaxis()
        axis.set_xlabel("over float32")
        axis.set_title(table.title)
        axis.tick_params(labelsize=6)
    return figure


def orders_of(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    parser.add_argument("--rounds", type=int, default=25, help="(%(default)s)")
    parser.add_argument("--orders", type=orders_of, help="in place of the preset's")
    args = parser.parse_args()
    orders = args.orders or ORDERS[args.preset]
    shapes = [(n, n) for n in orders] + [(n // WIDE, n) for n in orders if n >= 2 * min(orders)]
    makers: dict[str, Callable[[], _record.Table]] = {
        "bases": lambda: _record.Table(
            "Four rotations",
            READING,
            [row for shape in shapes for row in reading(args.rounds, shape, args.seed)],
        ),
        "statistics": lambda: _record.Table(
            "A statistic",
            RENEWING,
            [row for order in orders for row in renewing(args.rounds, order, args.seed)],
        ),
    }
    tables = [makers[name]() for name in args.only]
    about = (
        "Times of programs that take turns (on CPUs: processor time of all threads); ratios are "
        "medians over rounds of the time beside that of float32 in the same round. *Four "
        "rotations*: a gradient into the bases of both sides and back. With its statistics a SOAP "
        "step has half as many products again: *added* is what reading takes beside all of them "
        f"(aim: at most {ADDED} from order 512 on). *A statistic*: decoded, averaged with the Gram "
        f"matrix of a square gradient, encoded (aim: at most {RENEWED})."
    )
    settings = {"rounds": args.rounds, "orders": orders}
    title = "What storages add to a step"
    _record.write(args, "reading", title, about, tables, figure_of(tables), settings)


if __name__ == "__main__":
    main()
