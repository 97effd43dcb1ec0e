"""What low-rank methods and SOAP cost between refreshes, and what finding a subspace costs.

    python benchmarks/subspace_time.py                  # all tables
    python benchmarks/subspace_time.py --only finders   # low_rank, soap or finders

Every program is compiled with its state donated, contenders take turns, medians are shown, and the
ratio is to the first row of the table, which is what the method cannot do without. Trees are those
of `step_time.py`: 12 layers of four 256×256, one 256×1024 and one 1024×256.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from refresh_time import NEVER, Steps, measure, started
from step_time import layers
from tqdm import tqdm

import curvax
from curvax import subspaces

RANK = 64


def products_alone(grads: Any, rank: int) -> Steps:
    """The projection of every gradient on its smaller side, and the way back."""

    def basis(g: jax.Array) -> jax.Array:
        return jnp.eye(min(g.shape), rank) + 0.1

    def update(grads: Any, state: Any) -> tuple[Any, Any]:
        def both(g: jax.Array, u: jax.Array) -> jax.Array:
            if g.shape[0] <= g.shape[1]:
                return u @ jax.lax.optimization_barrier(u.T @ g)
            return jax.lax.optimization_barrier(g @ u) @ u.T

        return jax.tree.map(both, grads, state), state

    return Steps(update, jax.tree.map(basis, grads), grads)


def with_gradients_as_params(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optax's GaLore asks for parameters, although without weight decay it only reads shapes."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return inner.update(updates, state, updates)

    return optax.GradientTransformation(inner.init, update)


def low_rank(rounds: int) -> str:
    """GaLore, Fira and Alice against GaLore's two products, and against Optax's GaLore."""
    grads = layers()

    def ours(make: Any, **settings: Any) -> Steps:
        return started(make(1.0, rank=RANK, refresh=NEVER, **settings), grads)

    contenders = {
        "two products": products_alone(grads, RANK),
        "galore": ours(curvax.galore),
        "optax.contrib.galore": started(
            with_gradients_as_params(optax.contrib.galore(1.0, RANK, NEVER)), grads
        ),
        "fira": ours(curvax.fira),
        "alice, tracking=False": ours(curvax.alice, tracking=False),
        "alice": ours(curvax.alice),
        "apollo": ours(curvax.apollo, output_layer=None),
        "sumo, Newton-Schulz": ours(curvax.sumo, method="newton_schulz"),
    }
    table = measure(contenders, rounds, f"step at rank {RANK}")
    galore = contenders["galore"].median()
    ratios = ", ".join(
        f"{name} {contenders[name].median() / galore:.2f}"
        for name in ("alice", "alice, tracking=False")
    )
    peer = galore / contenders["optax.contrib.galore"].median()
    return f"{table}\n\nTo galore: {ratios}. galore to optax.contrib.galore: {peer:.2f}."


def rotations_alone(grads: Any) -> Steps:
    """Four products with square matrices for every gradient: into both bases and back."""
    square = lambda n: jnp.eye(n) + 0.1  # noqa: E731
    state = jax.tree.map(lambda g: [square(g.shape[0]), square(g.shape[1])], grads)

    def update(grads: Any, state: Any) -> tuple[Any, Any]:
        def both(g: jax.Array, bases: list[jax.Array]) -> jax.Array:
            left, right = bases
            inside = jax.lax.optimization_barrier(left.T @ g @ right)
            return left @ inside @ right.T

        return jax.tree.map(both, grads, state), state

    return Steps(update, state, grads)


def soap(rounds: int) -> str:
    """SOAP against its four rotations; its two statistics come on top."""
    grads = layers()
    contenders = {
        "four rotation products": rotations_alone(grads),
        "soap": started(curvax.soap(1.0, refresh=NEVER), grads),
        "eigen_adam, smaller side": started(
            curvax.eigen_adam(1.0, refresh=NEVER, side="smaller"), grads
        ),
    }
    return measure(contenders, rounds, "step")


def finders(rounds: int) -> str:
    """The randomized range finder against the exact decomposition at (1024, 4096), rank 128."""
    m, n, rank = 1024, 4096, 128
    generator = np.random.default_rng(0)
    left = np.linalg.qr(generator.standard_normal((m, m)))[0]
    right = np.linalg.qr(generator.standard_normal((n, m)))[0]
    bases = {"svd": subspaces.svd(), "randomized": subspaces.randomized()}
    spectra = {
        name: jnp.asarray((left * np.arange(1, m + 1) ** -power) @ right.T, "float32")
        for name, power in (("1/i", 1.0), ("1/√i", 0.5))
    }

    def find(name: str) -> Any:
        def one(g: jax.Array) -> jax.Array:
            check = subspaces.SubspaceCheck(
                g, g[:, :rank], None, None, jnp.bool_(True), jax.random.key(0)
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
    first = statistics.median(times["svd"])
    rows = []
    for name in bases:
        ms = statistics.median(times[name])
        energies = [
            float(jnp.sum((found[name, s].T @ g) ** 2) / jnp.sum((found["svd", s].T @ g) ** 2))
            for s, g in spectra.items()
        ]
        rows.append(
            f"| {name} | {ms:.0f} | {ms / first:.3f} | {energies[0]:.5f} | {energies[1]:.5f} |"
        )
    head = f"| basis of {m}×{n}, rank {rank} | ms | ratio | energy, 1/i | energy, 1/√i |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


TABLES = {"low_rank": (low_rank, 30), "soap": (soap, 30), "finders": (finders, 3)}


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(description="Low-rank methods and SOAP.")
    parser.add_argument("--only", choices=sorted(TABLES), default=None)
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    for name, (table, rounds) in TABLES.items():
        if args.only in (None, name):
            print(table(args.rounds or rounds), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
