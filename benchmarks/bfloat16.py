"""Weights in bfloat16 and int8 at small learning rates: loss with each rounding, against float32.

    python -m benchmarks bfloat16              # several minutes on two CPU cores
    python -m benchmarks bfloat16 --steps 20   # only to see that it works

The task is `lm` of `python -m benchmarks train`. All runs of one seed have the same batches, and
the same first weights up to rounding. Activations are in float32 in all runs, so that only weights,
their gradients, and what the optimizer does with both differ.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _record
from ._curves import LINES, spread
from ._tasks import LM, WEIGHT_DECAY, Task, lm

SEEDS = 5
SIZES = LM | {"batch": 8}
RATES = {"AdamW": (1e-3, 1e-4), "racs": (1.6e-2, 1.6e-3)}  # 1/8 and 1/80 of the best
METHODS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "AdamW": lambda rate: optax.adamw(rate, weight_decay=WEIGHT_DECAY),
    "racs": lambda rate: curvax.racs(rate, weight_decay=WEIGHT_DECAY),
}
FLOAT32, INT8 = "float32", "matrices in int8"


def nearest(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """What the wrappers share, moments and updates in float32, with the common sum."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)


ROUNDINGS: dict[str, Callable[[Any, int], optax.GradientTransformation]] = {
    FLOAT32: lambda inner, seed: inner,
    "nearest": lambda inner, seed: inner,
    "nearest, moments in float32": lambda inner, seed: nearest(inner),
    "stochastic": lambda inner, seed: curvax.stochastic_rounding(inner, seed=seed),
    "Kahan": lambda inner, seed: curvax.kahan_summation(inner),
    "masters": lambda inner, seed: curvax.master_weights(inner),
    INT8: lambda inner, seed: curvax.int8_weights(curvax.stochastic_rounding(inner, seed=seed)),
}
COLUMNS = {
    "rounding": ("weights", ""),
    "bytes": ("bytes per weight, state included", ".2f"),
    "loss": ("validation loss, mean (range)", ""),
    "beyond": ("beyond float32's", ""),
    "still": ("weights that never moved, %", ".1f"),
}


def wide(params: Any) -> Any:
    """The weights in float32."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


class Program:
    """Training with one optimizer and rounding, compiled once for all rates and seeds."""

    def __init__(self, task: Task, make: Any, rounding: str):
        """Compiles nothing yet."""
        self.task, self.make, self.rounding = task, make, rounding
        self.dtype = jnp.float32 if rounding == FLOAT32 else jnp.bfloat16
        schedule = task.schedule()

        @jax.jit
        def stretch(rate: Any, params: Any, state: Any, moved: Any, batches: jax.Array) -> Any:
            optimizer = self.optimizer(lambda count: rate * schedule(count), 0)

            def step(carry: Any, places: jax.Array) -> Any:
                params, state, moved = carry
                loss = lambda p: task.loss_of(wide(p), task.data, places)  # noqa: E731
                gradients = jax.grad(loss)(curvax.from_int8(params))
                updates, state = optimizer.update(gradients, state, params)
                new = optax.apply_updates(params, updates)
                moved = jax.tree.map(lambda m, p, q: m | (p != q), moved, params, new)
                return (new, state, moved), None

            return jax.lax.scan(step, (params, state, moved), batches)[0]

        self.stretch = stretch

        @jax.jit
        def first(key: jax.Array) -> Any:
            params = jax.tree.map(lambda p: p.astype(self.dtype), task.params(key))
            params = curvax.to_int8(params) if rounding == INT8 else params
            return params, self.optimizer(lambda count: 0.0, 0).init(params)

        self.first = first

    def optimizer(self, rate: Any, seed: int) -> optax.GradientTransformation:
        """The optimizer in its wrapper."""
        return ROUNDINGS[self.rounding](self.make(rate), seed)

    def start(self, seed: int) -> Any:
        """Weights, state, and whether each weight has moved."""
        params, state = self.first(jax.random.key(seed))
        if self.rounding == "stochastic":
            state = state._replace(key=jax.random.key_data(jax.random.key(seed)))
        return params, state, jax.tree.map(lambda p: jnp.zeros(p.shape, bool), params)

    def train(self, rate: float, seeds: range) -> dict[str, Any]:
        """The losses `(seeds, points)` at one rate, and what stood still."""
        task, losses, shares, size = self.task, [], [], 0.0
        like = self.optimizer(lambda count: rate, 0)
        for seed in seeds:
            params, state, moved = self.start(seed)
            batches, found = task.batches(seed), []
            for start in range(0, task.steps, task.eval_every):
                part = batches[start : start + task.eval_every]
                params, state, moved = self.stretch(rate, params, state, moved, part)
                found.append(float(task.evaluate(wide(curvax.from_int8(params)))))
            losses.append(found)
            flags = np.concatenate([np.ravel(m) for m in jax.tree.leaves(moved)])
            shares.append(100 * np.mean(~flags))
            number = sum(x.size for x in jax.tree.leaves(curvax.from_int8(params)))
            own = sum(x.nbytes for x in jax.tree.leaves(params))
            size = (curvax.state_bytes(like, params) + own) / number
        return {"losses": np.array(losses), "still": float(np.mean(shares)), "bytes": size}


def table_of(name: str, rate: float, found: dict[str, Any], image: str) -> _record.Table:
    """The roundings of one optimizer at one rate."""
    rows = []
    for rounding, x in found.items():
        last = x["losses"][:, -1]
        beyond = last - found[FLOAT32]["losses"][:, -1]
        rows.append(
            {
                "rounding": rounding,
                "bytes": x["bytes"],
                "loss": spread(last, ".4f"),
                "beyond": "" if rounding == FLOAT32 else spread(beyond, "+.4f"),
                "still": x["still"],
                "losses": x["losses"].tolist(),
            }
        )
    return _record.Table(f"{name}, learning rate {rate:g}", COLUMNS, rows, image)


def draw(task: Task, found: dict[tuple[str, float], Any]) -> Figure:
    """Losses over steps, a panel for each optimizer and rate."""
    rows = len(found) // 2
    figure = Figure(figsize=(8.8, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    styles = dict(zip(ROUNDINGS, zip(_record.COLORS, itertools.cycle(LINES)), strict=False))
    for axis, ((name, rate), runs) in zip(axes.flat, found.items(), strict=True):
        for rounding, x in runs.items():
            losses, (color, style) = x["losses"], styles[rounding]
            steps = np.minimum(np.arange(1, losses.shape[1] + 1) * task.eval_every, task.steps)
            axis.plot(steps, losses.mean(0), style, color=color, label=rounding)
            axis.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.12, lw=0)
        axis.set(title=f"{name}, learning rate {rate:g}", xlabel="step")
        axis.set(ylabel=f"validation loss ({task.unit})")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(frameon=False, fontsize="small")
    return figure


ABOUT = """Weights in float32; in bfloat16 with sums rounded to the nearest (the optimizer alone, as
Optax applies it), with moments partly in bfloat16 or all in float32; and in bfloat16 with
`curvax.stochastic_rounding`, `curvax.kahan_summation` and `curvax.master_weights`, within which
moments are in float32; and with matrices in int8 by `curvax.int8_weights` around
`curvax.stochastic_rounding` for the other weights. Gradients have the dtype of the weights.
{about}; {seeds} seeds; weight decay {decay:g}."""


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = _record.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=LM["steps"], help="of a run (%(default)s)")
    methods = tuple(METHODS)
    help = f"some of {', '.join(methods)}, separated by commas"
    parser.add_argument("--methods", type=_record.names(methods), default=methods, help=help)
    return parser.parse_args()


def main() -> None:
    """Trains all of them and prints the tables."""
    args = parse()
    seeds = range(args.seed + 1, args.seed + 1 + SEEDS)
    task = lm(None, **SIZES | {"steps": args.steps})
    found: dict[tuple[str, float], Any] = {
        (name, rate): {} for name in args.methods for rate in RATES[name]
    }
    cells = [(name, rounding) for name in args.methods for rounding in ROUNDINGS]
    for name, rounding in tqdm(cells, desc="bfloat16"):
        program = Program(task, METHODS[name], rounding)
        for rate in RATES[name]:
            found[name, rate][rounding] = program.train(rate, seeds)
    images = ["![validation loss over steps](bfloat16.png)", *[""] * (len(found) - 1)]
    pairs = zip(found.items(), images, strict=True)
    tables = [table_of(name, rate, runs, image) for ((name, rate), runs), image in pairs]
    about = ABOUT.replace("\n", " ").format(about=task.about, seeds=SEEDS, decay=WEIGHT_DECAY)
    settings = {
        **task.sizes,
        "rates": {name: RATES[name] for name in args.methods},
        "seeds": SEEDS,
        "weight_decay": WEIGHT_DECAY,
    }
    title = "Weights in bfloat16 and int8 at small learning rates"
    _record.write(args, "bfloat16", title, about, tables, draw(task, found), settings)


if __name__ == "__main__":
    main()
