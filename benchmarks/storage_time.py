"""What 4-bit preconditioners cost and save: state, temporaries and time, beside float32.

    python benchmarks/storage_time.py                  # all tables, about 10 minutes
    python benchmarks/storage_time.py --only bytes     # bytes, temporaries, decoding or steps

Programs are compiled with their state donated, contenders take turns, medians are shown, and every
ratio is to the table's first row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from refresh_time import NEVER, measure, started
from tqdm import tqdm

import curvax

STORAGES = {
    "float32": curvax.dense(),
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
}


def shampoo(storage: Any, statistics_every: int = NEVER) -> Any:
    """Shampoo that never refreshes after its first step, on batches of matrices."""
    return curvax.precondition(
        refresh=curvax.every(NEVER, offset=1),
        root=4,
        b2=0.95,
        eps=1e-6,
        damping="relative",
        initial=1e-6,
        statistics_every=statistics_every,
        storage=storage,
    )


def grads(order: int, count: int, stacked: bool) -> Any:
    """`count` square gradients, in one stack or each for itself."""
    stack = jax.random.normal(jax.random.key(0), (count, order, order))
    return {"stack": stack} if stacked else {f"{i:02}": g for i, g in enumerate(stack)}


def state_bytes() -> str:
    """Bytes of factors and roots."""
    rows = []
    for order in (256, 512, 1024):
        tree = {"w": jax.ShapeDtypeStruct((order, order), jnp.float32)}
        found = {
            name: curvax.state_bytes(shampoo(storage), tree) for name, storage in STORAGES.items()
        }
        for name, number in found.items():
            rows.append(
                f"| {order} | {name} | {number:,} | {found['float32'] / number:.2f} "
                f"| {number / found['VQ']:.3f} |"
            )
    return "\n".join(
        ["| order | storage | bytes | float32 / this | this / VQ |", "|---|---|---|---|---|", *rows]
    )


def temporaries(order: int = 1024, count: int = 24) -> str:
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
                beyond = (sizes[name] - sizes["float32"]) / (4 * order**2)
                layout = "one stack" if stacked else "leaf by leaf"
                due = "due" if every == 1 else "not due"
                rows.append(
                    f"| {layout} | {due} | {name} | {sizes[name] / 1e6:.1f} | {beyond:+.2f} |"
                )
    head = f"{count} matrices of order {order}, two factors each\n\n"
    titles = "| layout | statistics | storage | temporaries, MB | decoded matrices beyond float32 |"
    return head + "\n".join([titles, "|---|---|---|---|---|", *rows])


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


def decoding(rounds: int) -> str:
    """One matrix at a time against all at once, and each in an entry of its own."""
    tables = []
    for order, count in ((128, 48), (256, 24), (512, 12), (1024, 6)):
        vq = curvax.quantized()
        contenders = {
            "all at once": started(shampoo(AtOnce(vq.codec)), grads(order, count, True)),
            "one at a time": started(shampoo(OneByOne(vq.codec)), grads(order, count, True)),
            "leaf by leaf": started(shampoo(vq), grads(order, count, False)),
            "float32": started(shampoo(curvax.dense()), grads(order, count, True)),
        }
        tables.append(measure(contenders, rounds, f"VQ, {count} of order {order}"))
    return "\n\n".join(tables)


def steps(rounds: int) -> str:
    """Whole steps between refreshes, without statistics and with."""
    tables = []
    for order, count in ((256, 8), (512, 4), (1024, 3)):
        for every in (NEVER, 1):
            contenders = {}
            for name, storage in tqdm(STORAGES.items(), leave=False):
                tree = grads(order, count, False)
                contenders[name] = started(shampoo(storage, every), tree)
            due = "statistics due" if every == 1 else "no statistics due"
            tables.append(measure(contenders, rounds, f"{count} of order {order}, {due}"))
    return "\n\n".join(tables)


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(description="What 4-bit preconditioners cost and save.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=["bytes", "temporaries", "decoding", "steps"])
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    tables: dict[str, Callable[[], str]] = {
        "bytes": state_bytes,
        "temporaries": temporaries,
        "decoding": functools.partial(decoding, args.rounds),
        "steps": functools.partial(steps, args.rounds),
    }
    for name, table in tables.items():
        if args.only in (None, name):
            print(table(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
