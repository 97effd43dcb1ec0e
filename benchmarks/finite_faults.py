"""What finite but odd gradients do: spikes, pauses, alternation and constants, for every method.

    python -m benchmarks finite                        # all of it, about 10 minutes
    python -m benchmarks finite --methods muon soap    # these only, without writing the page

*Lengths.* Each method runs through a trajectory of random gradients (`gradients`), and through the
same trajectory with one oddity. The table has the longest update of a matrix over the longest one
of the clean run, both after the first refresh period, in which first steps may be long.

*Losses.* A small network is trained, at the learning rate that does best without spikes; in 1 % of
the steps the gradient of one leaf is too long. The table has the losses in the end, also with
`optax.clip_by_global_norm` before the method and with `skip_spikes` around it.

The clipping threshold is the longest gradient of the clean run, which one seldom knows. Methods
have their own hyperparameters, refresh every 20 steps, and have no base optimizer.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import curvax

from ._rows import NAMED, REGISTRY, Row
from .faults import machine, table

RESULTS = Path(__file__).parent / "results" / "finite_faults.md"
PERIOD, ALONE, TRAINING = 20, 200, 1_000  # steps
RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
CODES = {
    "": {},
    "4 bits": {"storage": curvax.quantized(block=8, min_elements=1)},
    "4 bits, CQ+EF": {"storage": curvax.cholesky(error_feedback=0.95, block=8, min_elements=1)},
}
KERNELS = {"wide/kernel": (16, 32), "tall/kernel": (32, 16)}
LAYERS = {
    "0/kernel": (8, 16),
    "0/bias": (16,),
    "1/kernel": (16, 16),
    "1/bias": (16,),
    "2/kernel": (16, 4),
}
SPIKES = {"×100": 2.0, "up to ×10¹⁷": 17.0}  # the logarithm of the longest


class Cell(NamedTuple):
    """A method with the code of its factors."""

    row: Row
    code: str

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"`{self.row.name}`" + (f", {self.code}" if self.code else "")

    def make(self, learning_rate: Any) -> Any:
        """The optimizer; all settings that are not about size or period are the method's own."""
        row = self.row
        own = {name: row.settings[name] for name in ("rank", "leading") if name in row.settings}
        own |= {name: PERIOD for name in ("refresh", "check_every") if name in row.defaults}
        own |= {**row.trained(PERIOD), **row.without_base, **CODES[self.code]}
        return row.optimizer(learning_rate, **own, matrices=curvax.MatrixRule(output_layer=None))


def cells(methods: Sequence[str]) -> list[Cell]:
    """Every method, and with every code if it has factors."""
    rows = [row for row in REGISTRY if row.name in methods]
    return [Cell(row, code) for row in rows for code in (CODES if row.factors else ("",))]


# Lengths.


@functools.cache
def gradients() -> dict[str, dict[str, np.ndarray]]:
    """Trajectories, with time first, by their names; the first is the clean one."""
    random = np.random.default_rng(0)
    mean, noise, fixed = (
        {name: random.standard_normal((*steps, *s)) for name, s in KERNELS.items()}
        for steps in ((), (ALONE,), ())
    )
    clean = {name: (mean[name] + noise[name]) / 10 for name in KERNELS}
    struck = random.choice(np.arange(PERIOD, ALONE), ALONE // 100, replace=False)
    t = np.arange(ALONE)

    def times(factor: np.ndarray) -> dict[str, np.ndarray]:
        return {name: factor[:, None, None] * g for name, g in clean.items()}

    def repeated(sign: np.ndarray) -> dict[str, np.ndarray]:
        return {name: sign[:, None, None] * g / 10 for name, g in fixed.items()}

    found = {
        "clean": clean,
        "×100": times(np.where(np.isin(t, struck), 1e2, 1)),
        "×10¹⁷": times(np.where(np.isin(t, struck), 1e17, 1)),
        "every fifth step": times(np.where(t % 5, 0, 1)),
        "30 zeros": times(np.where((t >= 65) & (t < 95), 0, 1)),
        "alternating": repeated(np.where(t % 2, -1.0, 1.0)),
        "constant": repeated(np.ones(ALONE)),
    }
    return {name: jax.tree.map(np.float32, tree) for name, tree in found.items()}


def lengths(cell: Cell) -> dict[str, float]:
    """The longest update over the clean run's, by trajectory; NaN if one is not finite."""
    optimizer = cell.make(1.0)

    @jax.jit
    def longest(gradients: Any) -> jax.Array:
        params = {name: jnp.zeros(shape) for name, shape in KERNELS.items()}

        def step(state: Any, gradient: Any) -> Any:
            updates, state = optimizer.update(gradient, state, params)
            norms = [jnp.linalg.norm(x) for x in jax.tree.leaves(updates)]
            return state, jnp.max(jnp.stack(norms))

        return jnp.max(jax.lax.scan(step, optimizer.init(params), gradients)[1][PERIOD:])

    found = {name: float(longest(g)) for name, g in gradients().items()}
    clean = found.pop("clean")
    return {name: x / clean for name, x in found.items()}


# Losses.


@functools.cache
def data() -> tuple[Any, Any, Any]:
    """First parameters, inputs and outputs of another network."""
    random = np.random.default_rng(0)
    first, teacher = (
        {
            name: np.float32(random.standard_normal(s) / np.sqrt(s[0]) * (len(s) > 1))
            for name, s in LAYERS.items()
        }
        for _ in range(2)
    )
    x = np.float32(random.standard_normal((256, LAYERS["0/kernel"][0])))
    return first, x, np.asarray(outputs(teacher, x))


def outputs(params: Any, x: Any) -> jax.Array:
    """The network."""
    for layer in "01":
        x = jnp.tanh(x @ params[f"{layer}/kernel"] + params[f"{layer}/bias"])
    return x @ params["2/kernel"]


def spikes(largest: float) -> dict[str, np.ndarray]:
    """By what each leaf's gradient is multiplied, `(steps,)`."""
    random = np.random.default_rng(1)
    factors = {name: np.ones(TRAINING, np.float32) for name in LAYERS}
    for t in random.choice(np.arange(PERIOD, TRAINING), TRAINING // 100, replace=False):
        factor = 10.0 ** (largest if largest <= 2 else random.uniform(2, largest))
        factors[random.choice(list(LAYERS))][t] = factor
    return factors


class Training:
    """A method's training runs: one program for all of them."""

    def __init__(self, cell: Cell):
        """Finds the learning rate."""
        first, x, y = data()

        @jax.jit
        def run(rate: Any, factors: Any, most: Any, ratio: Any) -> Any:
            schedule = lambda t: rate * (1 - t / TRAINING)  # noqa: E731
            optimizer = curvax.skip_spikes(
                optax.chain(optax.clip_by_global_norm(most), cell.make(schedule)), ratio
            )
            loss = lambda params: jnp.mean(jnp.square(outputs(params, x) - y))  # noqa: E731

            def step(carry: Any, factor: Any) -> Any:
                params, state = carry
                gradient = jax.tree.map(jnp.multiply, jax.grad(loss)(params), factor)
                updates, state = optimizer.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state), optax.tree.norm(gradient)

            start = jax.tree.map(jnp.asarray, (first, optimizer.init(first)))
            (params, state), norms = jax.lax.scan(step, start, factors)
            return loss(params), jnp.max(norms), state.counts.of("spikes").sum()

        self.run = run
        clean = {name: np.ones(TRAINING, np.float32) for name in LAYERS}
        tried = {rate: run(rate, clean, np.inf, np.inf) for rate in RATES}
        finite = {rate: float(x[0]) for rate, x in tried.items() if np.isfinite(x[0])}
        self.rate = min(finite, key=finite.__getitem__)
        self.clean, self.longest, _ = map(float, tried[self.rate])
        self.skipped = int(run(self.rate, clean, np.inf, 10.0)[2])  # of the clean run

    def losses(self) -> Iterator[float]:
        """Clean and skipping there; for each kind of spikes: plain, clipped, skipped."""
        clean = {name: np.ones(TRAINING, np.float32) for name in LAYERS}
        yield self.clean
        yield float(self.run(self.rate, clean, np.inf, 10.0)[0])
        for largest in SPIKES.values():
            factors = spikes(largest)
            for most, ratio in ((np.inf, np.inf), (self.longest, np.inf), (np.inf, 10.0)):
                yield float(self.run(self.rate, factors, most, ratio)[0])


def shown(x: float) -> str:
    """Two digits."""
    return f"{x:.2g}" if np.isfinite(x) else "not finite"


def page(found: dict[str, tuple[dict[str, float], list[str]]], seconds: float) -> str:
    """The results."""
    _, *kinds = gradients()
    alone = [[name, *(shown(ratio[k]) for k in kinds)] for name, (ratio, _) in found.items()]
    trained = [[name, *losses] for name, (_, losses) in found.items()]
    each = [f"{kind}{how}" for kind in SPIKES for how in ("", ", clipped", ", `skip_spikes`")]
    titles = ("method", "rate", "clean", "clean, `skip_spikes`", *each)
    parts = [
        "# What finite but odd gradients do",
        "`benchmarks/finite_faults.py` describes both tables.",
        f"## The longest update over the clean run's longest, {ALONE} steps",
        "Gradients are a mean and noise of the same size. *×100, ×10¹⁷*: all of them, in 1 % of "
        "the steps. *Every fifth step*, *30 zeros*: all others are zero. *Alternating*: `G` and "
        "`−G`. *Constant*: `G`.",
        table(("method", *kinds), alone),
        f"## The loss after {TRAINING:,} steps",
        "Spikes are in the gradient of one leaf, in 1 % of the steps.",
        table(titles, trained),
        f"`{shlex.join(['python', '-m', 'benchmarks', 'finite', *sys.argv[1:]])}`, {seconds:,.0f} "
        f"seconds, {machine()}.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Prints the page, and writes it if it has all methods."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--methods", nargs="+", choices=NAMED, default=list(NAMED), metavar="METHOD"
    )
    args = parser.parse_args()
    start, found = time.perf_counter(), {}
    for cell in tqdm(cells(args.methods), unit="cell", file=sys.stderr):
        training = Training(cell)
        losses = [f"{training.rate:g}", *map(shown, training.losses())]
        found[cell.name] = (lengths(cell), losses)
        jax.clear_caches()
    text = page(found, time.perf_counter() - start)
    print(text)
    if args.methods == list(NAMED):
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
