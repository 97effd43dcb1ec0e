"""What preconditioners of few bits cost and save: state, temporaries and time, beside float32.

    python -m benchmarks storage                     # all tables, about 10 minutes
    python -m benchmarks storage --only bytes        # bytes, temporaries, decoding or steps

States are donated, the programs of a table take turns, and every ratio is to the table's first row.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _record
from .refresh_time import TIMES, draw, measured, started

SECTIONS = ("bytes", "temporaries", "decoding", "steps")
NEVER = 10**6
# Orders; the one of `temporaries`, and its number of matrices; rows of a batch for the others.
PRESETS = {
    "cpu": ((256, 512, 1024), 1024, 24, 8 * 256),
    "gpu": ((1024, 2048, 4096), 4096, 24, 8 * 1024),
}
STORAGES = {
    "float32": curvax.dense(),
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "packed": curvax.packed(),
}
BYTES = {
    "storage": ("storage", ""),
    "order": ("order", "d"),
    "bytes": ("bytes", ",d"),
    "saved": ("float32 / this", ".2f"),
    "over_vq": ("this / VQ", ".3f"),
}
TEMPORARIES = {
    "storage": ("storage", ""),
    "layout": ("layout", ""),
    "statistics": ("statistics", ""),
    "temporaries": ("temporaries, MB", ".1f"),
    "beyond": ("decoded matrices beyond float32", "+.2f"),
}


def shampoo(storage: Any, statistics_every: int = NEVER) -> Any:
    """Shampoo that never refreshes after its first step, on batches of matrices."""
    return curvax.precondition(
        refresh=curvax.every(NEVER, offset=1),
        root=4,
        b2=0.95,
        eps=1e-6,
        damping_mode="relative",
        initial=1e-6,
        statistics_every=statistics_every,
        storage=storage,
    )


def grads(order: int, count: int, stacked: bool, seed: int = 0) -> Any:
    """`count` square gradients, in one stack or each for itself."""
    stack = jax.random.normal(jax.random.key(seed), (count, order, order))
    return {"stack": stack} if stacked else {f"{i:02}": g for i, g in enumerate(stack)}


def state_bytes(orders: tuple[int, ...]) -> list[_record.Table]:
    """Bytes of factors and roots."""
    rows = []
    for order in orders:
        tree = {"w": jax.ShapeDtypeStruct((order, order), jnp.float32)}
        found = {name: curvax.state_bytes(shampoo(kept), tree) for name, kept in STORAGES.items()}
        for name, number in found.items():
            row: dict[str, Any] = {"storage": name, "order": order, "bytes": number}
            row |= {"saved": found["float32"] / number, "over_vq": number / found["VQ"]}
            rows.append(row)
    return [_record.Table("Bytes of the two factors and roots of a square matrix", BYTES, rows)]


def temporaries(order: int, count: int) -> list[_record.Table]:
    """Temporaries of a step, in decoded matrices beyond those of float32."""
    rows = []
    for every in (NEVER, 1):
        for stacked in (True, False):
            tree = jax.eval_shape(lambda s=stacked: grads(order, count, s))
            sizes = {}
            for name, storage in STORAGES.items():
                transform = shampoo(storage, every)
                step = jax.jit(transform.update, donate_argnums=(0, 1))
                state = jax.eval_shape(transform.init, tree)
                memory: Any = step.lower(tree, state).compile().memory_analysis()
                sizes[name] = memory.temp_size_in_bytes
                rows.append(
                    {
                        "storage": name,
                        "layout": "one stack" if stacked else "leaf by leaf",
                        "statistics": "due" if every == 1 else "not due",
                        "temporaries": sizes[name] / 1e6,
                        "beyond": (sizes[name] - sizes["float32"]) / (4 * order**2),
                    }
                )
    title = f"Temporaries of a step, {count} matrices of order {order}"
    return [_record.Table(title, TEMPORARIES, rows)]


@dataclasses.dataclass(frozen=True)
class AtOnce(type(curvax.quantized())):
    """Decodes a whole batch at once, whatever its order."""

    def one_by_one(self, order: int) -> bool:
        """Never."""
        del order
        return False


@dataclasses.dataclass(frozen=True)
class OneByOne(AtOnce):
    """Decodes one matrix at a time, whatever its order."""

    def one_by_one(self, order: int) -> bool:
        """Always."""
        del order
        return True


def decoding(rounds: int, orders: tuple[int, ...], height: int, seed: int) -> list[_record.Table]:
    """One matrix at a time against all at once, and each in an entry of its own."""
    tables = []
    for order in (orders[0] // 2, *orders):
        count = max(2, 3 * height // order)
        vq = curvax.quantized()
        programs = {
            "all at once": started(shampoo(AtOnce(vq.codec)), grads(order, count, True, seed)),
            "one at a time": started(shampoo(OneByOne(vq.codec)), grads(order, count, True, seed)),
            "leaf by leaf": started(shampoo(vq), grads(order, count, False, seed)),
            "float32": started(shampoo(curvax.dense()), grads(order, count, True, seed)),
        }
        title = f"Decoding VQ, {count} of order {order}"
        tables.append(_record.Table(title, TIMES, measured(programs, rounds, title)))
    return tables


def steps(rounds: int, orders: tuple[int, ...], height: int, seed: int) -> list[_record.Table]:
    """Whole steps between refreshes, without statistics and with."""
    tables = []
    for order in orders:
        count = max(2, height // order)
        for every in (NEVER, 1):
            programs = {}
            for name, storage in tqdm(STORAGES.items(), desc="compile", file=sys.stderr):
                tree = grads(order, count, False, seed)
                programs[name] = started(shampoo(storage, every), tree)
            due = "statistics due" if every == 1 else "no statistics due"
            title = f"A step, {count} of order {order}, {due}"
            tables.append(_record.Table(title, TIMES, measured(programs, rounds, title)))
    return tables


def figure_of(tables: list[_record.Table]) -> Figure:
    """Times of the storages; bytes and temporaries for tables without times."""
    timed = [table for table in tables if table.columns is TIMES]
    return draw(timed or tables)


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, SECTIONS)
    parser.add_argument("--rounds", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--order", type=int, help="the only one, in place of the preset's")
    args = parser.parse_args()
    orders, largest, count, height = PRESETS[args.preset]
    if args.order is not None:
        orders, largest, count, height = (args.order,), args.order, 2, 2 * args.order
    makers: dict[str, Callable[[], list[_record.Table]]] = {
        "bytes": functools.partial(state_bytes, orders),
        "temporaries": functools.partial(temporaries, largest, count),
        "decoding": functools.partial(decoding, args.rounds, orders, height, args.seed),
        "steps": functools.partial(steps, args.rounds, orders, height, args.seed),
    }
    tables = [table for name in args.only for table in makers[name]()]
    about = (
        "Shampoo's factors and roots, with donated state. The programs of a table take turns; "
        "ratios are to its first row."
    )
    settings = {"rounds": args.rounds, "orders": orders}
    figure = figure_of(tables)
    _record.write(args, "storage", "4-bit preconditioners", about, tables, figure, settings)


if __name__ == "__main__":
    main()
