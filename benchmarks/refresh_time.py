"""What refresh policies cost: between refreshes, at checks, and staggered.

    python benchmarks/refresh_time.py                 # all tables
    python benchmarks/refresh_time.py --only steps    # steps, checks, stagger or memory

Every program is compiled with its state donated, contenders take turns, medians are shown, and the
ratio is to the first row of the table, which is what the method cannot do without.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_time import layers
from tqdm import tqdm

import curvax

NEVER = 10**6


class Steps:
    """A compiled `(state, gradients) -> (updates, state)` and the times it took."""

    def __init__(self, update: Callable[..., Any], state: Any, grads: Any):
        """Compiles for one tree of gradients."""
        self.grads, self.state = grads, state
        # JAX gives donated buffers to outputs of their shape in order: the state comes first, or
        # the updates of square matrices take the buffers of its factors.
        swapped = jax.jit(lambda g, s: update(g, s)[::-1], donate_argnums=1)
        self.compiled = swapped.lower(grads, state).compile()
        self.times: list[float] = []

    def run(self) -> None:
        """One step, timed."""
        start = time.perf_counter()
        self.state, updates = self.compiled(self.grads, self.state)
        jax.block_until_ready((updates, self.state))
        self.times.append(1e3 * (time.perf_counter() - start))

    def median(self) -> float:
        """Median over the steps after the first three, in ms."""
        return statistics.median(self.times[3:])


def measure(contenders: dict[str, Steps], rounds: int, name: str) -> str:
    """A table of median times and ratios to the first contender."""
    for _ in tqdm(range(rounds + 3), desc=name, file=sys.stderr):
        for steps in contenders.values():
            steps.run()
    first = next(iter(contenders.values())).median()
    rows = [f"| {n} | {s.median():.1f} | {s.median() / first:.2f} |" for n, s in contenders.items()]
    return "\n".join([f"| {name} | ms | ratio |", "|---|---|---|", *rows])


def started(transform: optax.GradientTransformation, grads: Any) -> Steps:
    """The transformation after its first step, in which everything is refreshed."""
    _, state = jax.jit(transform.update)(grads, transform.init(grads))
    return Steps(transform.update, state, grads)


def products_alone(grads: Any, with_statistics: bool) -> Steps:
    """Shampoo's matrix products and nothing else: two to apply the roots, two for statistics."""
    square = lambda n: jnp.eye(n) + 0.1  # noqa: E731
    state = jax.tree.map(
        lambda g: [square(g.shape[0]), square(g.shape[1]), square(g.shape[0]), square(g.shape[1])],
        grads,
    )

    def update(grads: Any, state: Any) -> tuple[Any, Any]:
        def one(g: jax.Array, s: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            left, right, left_root, right_root = s
            if with_statistics:
                left = 0.95 * left + 0.05 * (g @ g.T)
                right = 0.95 * right + 0.05 * (g.T @ g)
            return left_root @ g @ right_root, [left, right, left_root, right_root]

        leaves, treedef = jax.tree.flatten(grads)
        pairs = [one(g, s) for g, s in zip(leaves, treedef.flatten_up_to(state), strict=True)]
        return treedef.unflatten([p[0] for p in pairs]), treedef.unflatten([p[1] for p in pairs])

    return Steps(update, state, grads)


def shampoo(refresh: Any, statistics_every: int = 1, **kw: Any) -> optax.GradientTransformation:
    """Shampoo as the adaptive methods use it, without grafting, on a tree of matrices."""
    direction = curvax.scale_by_shampoo(
        b2=0.95,
        eps=1e-9,
        root=2,
        refresh=refresh,
        statistics_every=statistics_every,
        graft=None,
        damping="absolute",
        initial=0.0,
        **kw,
    )
    return curvax.on_matrices(direction)


def steps(rounds: int) -> str:
    """Steps on which nothing is due, on the 12-layer tree."""
    grads = layers()
    stale = curvax.every(NEVER, offset=1)
    with_statistics = {
        "products alone, with statistics": products_alone(grads, True),
        "Shampoo between refreshes": started(shampoo(stale), grads),
    }
    without = {
        "products alone": products_alone(grads, False),
        "Shampoo between refreshes, no statistics due": started(shampoo(stale, NEVER), grads),
    }
    policies = {
        "Shampoo between refreshes": started(shampoo(stale), grads),
        "FOAM, no check due": started(shampoo(curvax.policies.foam(NEVER)), grads),
        "DR, no check due": started(shampoo(curvax.policies.diagonal_residual(NEVER)), grads),
    }
    return "\n\n".join(
        [
            measure(with_statistics, rounds, "12 layers of width 256, statistics due"),
            measure(without, rounds, "12 layers of width 256, no statistics due"),
            measure(policies, rounds, "12 layers of width 256, by policy"),
        ]
    )


def checks(rounds: int, order: int = 512, count: int = 4) -> str:
    """A check that refreshes nothing, beside three products of its order and a decomposition."""
    key = jax.random.key(0)
    factors = jax.random.normal(key, (count, order, 2 * order))
    factors = factors @ factors.mT / (2 * order)
    grads = {"factors": factors}

    def products(grads: Any, state: Any) -> tuple[Any, Any]:
        def three(x: jax.Array) -> jax.Array:
            return (x @ x) @ x @ x

        return jax.lax.map(three, grads["factors"]), state

    def decompositions(grads: Any, state: Any) -> tuple[Any, Any]:
        return jax.lax.map(jnp.linalg.eigh, grads["factors"]), state

    def check(policy: Any) -> Steps:
        # One side, one matrix a factor: statistics never due, so that checks are all that happens.
        transform = curvax.precondition(
            refresh=policy, sides="left", root=2, b2=0.0, eps=1e-9, statistics_every=2
        )
        thin = {"w": jnp.linalg.cholesky(factors)[..., : order // 64]}
        state = transform.init(thin)
        _, state = jax.jit(transform.update)(thin, state)
        full = state.left["w"]._replace(statistic=factors)
        state = state._replace(left={"w": full})
        _, state = jax.jit(transform.update)(thin, state._replace(count=jnp.int32(0)))
        # From here on the count stays where a check is due and statistics are not.
        fixed = jnp.int32(2)

        def update(grads: Any, state: Any) -> tuple[Any, Any]:
            updates, new = transform.update(grads, state._replace(count=fixed))
            return updates, new

        return Steps(update, state, thin)

    foam = curvax.policies.foam(1, float("inf"), 1.0)
    residual = curvax.policies.diagonal_residual(1, 1e9)
    table = measure(
        {
            "three products": Steps(products, jnp.zeros(()), grads),
            "FOAM check, nothing refreshed": check(foam),
            "DR check, nothing refreshed": check(residual),
            "eigendecomposition": Steps(decompositions, jnp.zeros(()), grads),
        },
        rounds,
        f"{count} factors of order {order}",
    )
    return table


def stagger(steps_timed: int, order: int = 512, period: int = 50, count: int = 64) -> str:
    """Step times of Shampoo with its refreshes together and staggered."""
    grads = {f"w{i:02d}": jax.random.normal(jax.random.key(i), (order, 64)) for i in range(count)}
    rows = []
    for staggered in (False, True):
        policy = curvax.every(period, offset=1, stagger=staggered)
        transform = curvax.on_matrices(
            curvax.precondition(refresh=policy, sides="left", root=4, eps=1e-6)
        )
        run = started(transform, grads)
        for _ in tqdm(range(steps_timed), desc=f"stagger={staggered}", file=sys.stderr):
            run.run()
        times = np.array(run.times)
        refreshes = jax.tree.leaves(
            jax.tree.map(
                lambda f: f.refreshes,
                run.state.inner.left,
                is_leaf=lambda x: hasattr(x, "refreshes"),
            )
        )
        median, p99 = np.median(times), np.percentile(times, 99)
        rows.append(
            f"| {staggered} | {median:.1f} | {p99:.1f} | {p99 / median:.2f} | "
            f"{sum(int(r.sum()) for r in refreshes)} |"
        )
    head = f"{count} factors of order {order}, k = {period}, {steps_timed} consecutive steps\n\n"
    return head + "\n".join(
        ["| stagger | median, ms | p99, ms | ratio | refreshes |", "|---|---|---|---|---|", *rows]
    )


def memory(order: int = 256) -> str:
    """Temporaries of a step with a refresh, for few and many matrices of one shape."""
    rows = []
    for count in (4, 32):
        grads = {"stack": jnp.ones((count, order, order))}
        for name, policy in {
            "every": curvax.every(10),
            "foam": curvax.policies.foam(10),
            "diagonal_residual": curvax.policies.diagonal_residual(10),
        }.items():
            transform = curvax.precondition(refresh=policy, root=2, eps=1e-9)
            program = Steps(transform.update, transform.init(grads), grads)
            temporaries = program.compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore
            # Products of the whole batch, for its statistics and directions, are as large as it.
            beyond = (temporaries - grads["stack"].nbytes) / (4 * order**2)
            rows.append(f"| {name} | {count} | {temporaries / 1e6:.1f} | {beyond:.1f} |")
    return "\n".join(
        [
            f"| policy | matrices of order {order} | temporaries, MB | beyond a batch, matrices |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(description="What refresh policies cost.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=["steps", "checks", "stagger", "memory"])
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    tables: dict[str, Callable[[], str]] = {
        "steps": functools.partial(steps, args.rounds),
        "checks": functools.partial(checks, args.rounds),
        "stagger": functools.partial(stagger, 200),
        "memory": memory,
    }
    for name, table in tables.items():
        if args.only in (None, name):
            print(table(), end="\n\n")


if __name__ == "__main__":
    main()
