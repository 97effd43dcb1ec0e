"""Training with Shampoo's factors and roots in float32 and in 4 bits: 4-bit Shampoo's Figure 4.

    python -m benchmarks.papers.shampoo_4bit           # the digits, 3 minutes
    python -m benchmarks.papers.shampoo_4bit --full    # and the language model, half an hour

Shampoo on AdamW as in the paper (Li et al., arXiv:2412.10663, section 6), with float32 factors and
roots, vanilla quantization (VQ), Cholesky quantization (CQ) and CQ with error feedback (CQ+EF), and
AdamW alone, on the models and data of `examples/train_digits.py` and `examples/train_lm.py`. Tiles
are of the published width, B = 64, and for CQ+EF also of 16, which costs 3 % more bytes, and of 32,
1 % more, with the error fed back without averaging (βe = 0 in the place of 0.95).
Statistics are taken every 5 steps and roots every 20, not every 100 and 500, because the runs have
some 200 steps. The learning rate is tuned for float32 on the printed grid, which grows until the
best is inside, and is the same in all forms of Shampoo; AdamW alone has its own, from the same
grid. Tuning has a seed of its own; three others are compared.

Runs that have finished are kept under runs/shampoo_4bit and are not repeated.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import curvax

from . import _model, _report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lm

STORAGES = {
    "float32": curvax.dense(),
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
    "CQ+EF, B = 16": curvax.cholesky(block=16, error_feedback=0.95),
    "CQ+EF, B = 32, βe = 0": curvax.cholesky(block=32, error_feedback=0.0),
}
ALONE = "AdamW alone"
COLORS = {
    "float32": _report.BLACK,
    "VQ": _report.VERMILION,
    "CQ": _report.BLUE,
    "CQ+EF": _report.GREEN,
    "CQ+EF, B = 16": _report.PURPLE,
    "CQ+EF, B = 32, βe = 0": _report.SKY,
    ALONE: _report.ORANGE,
}
STATISTICS_EVERY, REFRESH = 5, 20
EVAL_EVERY = 20
SEEDS = (1, 2, 3)
RUNS = Path("runs", "shampoo_4bit")


class Run(NamedTuple):
    """What one training run leaves."""

    history: list[list[float]]  # step, smoothed training loss, loss on held-out data
    accuracy: float | None
    refreshes: int  # roots computed, of the factors that are coded
    indefinite: int  # of those, from a factor with a negative eigenvalue
    failures: int  # Cholesky decompositions that failed

    @property
    def loss(self) -> float:
        """On held-out data, at the end."""
        return self.history[-1][2]


def shampoo(
    learning_rate: Any, storage: Any, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Shampoo on AdamW; other parameters have AdamW alone."""
    base = functools.partial(optax.adamw, weight_decay=weight_decay)
    return curvax.shampoo(
        learning_rate,
        statistics_every=STATISTICS_EVERY,
        refresh=REFRESH,
        base=base,
        storage=storage,
        others=base(learning_rate),
    )


def optimizer(
    method: str, learning_rate: Any, *, weight_decay: float
) -> optax.GradientTransformation:
    """One of the optimizers that are compared."""
    if method == ALONE:
        return optax.adamw(learning_rate, weight_decay=weight_decay)
    return shampoo(learning_rate, STORAGES[method], weight_decay)


# What a state holds.


def factors_of(state: Any) -> list[Any]:
    """Every factor in an optimizer's state."""
    is_factor = lambda x: hasattr(x, "refreshes")  # noqa: E731
    return [x for x in jax.tree.leaves(state, is_leaf=is_factor) if is_factor(x)]


def factor_bytes(state: Any) -> int:
    """Bytes of factors and roots."""
    kept = [(factor.statistic, factor.inverse_root) for factor in factors_of(state)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def counts(state: Any) -> dict[str, int]:
    """What `Run` says of the factors."""
    total = lambda x: int(np.sum(np.asarray(x)))  # noqa: E731
    coded = [f for f in factors_of(state) if not isinstance(f.inverse_root, jax.Array)]
    return {
        "refreshes": sum(total(f.refreshes) for f in coded),
        "indefinite": sum(total(f.indefinite) for f in coded),
        "failures": sum(total(getattr(f.statistic, "failures", 0)) for f in coded),
    }


# The digits: `examples/train_digits.py` trains when it is imported, so its model and data are here
# again.


class Network(nn.Module):
    """The network of `examples/train_digits.py`."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


BATCH = 64
TEST = 360  # images


class Digits:
    """12 epochs of 22 steps each, at a constant rate, as the example has it."""

    name = "digits"
    title = "Digits: a convolutional network, 264 steps"
    rates = (1e-3, 2e-3, 4e-3)
    held_out, scale = "test", "log"
    epochs = 12
    weight_decay = 0.01

    def __init__(self) -> None:
        """Reads the images."""
        images, labels = load_digits(return_X_y=True)
        shuffled = np.random.default_rng(0).permutation(len(images))
        self.images = jnp.asarray(images[shuffled].reshape(-1, 8, 8, 1) / 16, jnp.float32)
        self.labels = jnp.asarray(labels[shuffled])
        self.said = ("digits", self.epochs, BATCH)
        self.programs: dict[tuple[str, float], tuple[Any, Any]] = {}

    def init(self, seed: int) -> Any:
        """The parameters at step 0."""
        return Network().init(jax.random.key(seed), self.images[:1])["params"]

    def state(self, method: str) -> Any:
        """The optimizer's abstract state."""
        transform = optimizer(method, 1e-3, weight_decay=0.0)
        return jax.eval_shape(lambda: transform.init(self.init(0)))

    def program(self, method: str, rate: float) -> tuple[Any, Any]:
        """The transformation, and an epoch of training with a test after it; compiled once."""
        if (method, rate) in self.programs:
            return self.programs[method, rate]
        transform = optimizer(method, rate, weight_decay=self.weight_decay)
        images, labels = self.images[TEST:], self.labels[TEST:]
        held_out = self.images[:TEST], self.labels[:TEST]

        def losses(params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
            logits: Any = Network().apply({"params": params}, images)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, (logits.argmax(-1) == labels).mean()

        @jax.jit
        def epoch(params: Any, state: Any, order: jax.Array) -> tuple[Any, ...]:
            def step(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
                params, state = carry
                gradient = jax.value_and_grad(losses, has_aux=True)
                (loss, _), grads = gradient(params, images[batch], labels[batch])
                updates, state = transform.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), loss

            (params, state), found = jax.lax.scan(step, (params, state), order)
            return params, state, found.mean(), *losses(params, *held_out)

        self.programs[method, rate] = transform, epoch
        return transform, epoch

    def train(self, method: str, rate: float, seed: int) -> Run:
        """One run."""
        transform, epoch = self.program(method, rate)
        params = self.init(seed)
        state = transform.init(params)
        shuffle = np.random.default_rng(seed)
        images = len(self.images) - TEST
        batches = images // BATCH
        history, accuracy = [], 0.0
        for i in tqdm(range(1, self.epochs + 1), leave=False, file=sys.stderr):
            order = shuffle.permutation(images)[: batches * BATCH].reshape(batches, BATCH)
            params, state, loss, held_out, accuracy = epoch(params, state, jnp.asarray(order))
            history.append([i * batches, float(loss), float(held_out)])
        return Run(history, float(accuracy), **counts(state))


class Language:
    """The example's model and data, in a larger size."""

    name = "language model"
    title = "Language model: 4 layers of width 128, 200 steps"
    rates = (2e-3, 4e-3, 8e-3)
    held_out, scale = "validation", "linear"

    def __init__(self, steps: int = 200):
        """Reads the text."""
        self.steps = steps
        self.corpus = train_lm.read_corpus(None, _model.SIZES["context"])
        self.said = ("language model", steps, self.corpus.digest)

    def start(self, method: str, rate: float, seed: int) -> tuple[Any, Any, Any]:
        """The state at step 0, the step and the evaluation."""
        train_lm.OPTIMIZERS["this"] = functools.partial(optimizer, method)
        settings = {**_model.SIZES, "steps": self.steps, "seed": seed}
        config = train_lm.Config("this", rate, self.corpus.digest, **settings)
        return train_lm.make_run(config, self.corpus)

    def state(self, method: str) -> Any:
        """The optimizer's abstract state."""
        return jax.eval_shape(lambda: self.start(method, 1e-3, 0)[0]["opt_state"])

    def train(self, method: str, rate: float, seed: int) -> Run:
        """One run."""
        state, step, evaluate = self.start(method, rate, seed)
        step = step.lower(state, self.corpus.train).compile()
        history = []
        for i in tqdm(range(1, self.steps + 1), leave=False, file=sys.stderr):
            state = step(state, self.corpus.train)
            if i % EVAL_EVERY == 0 or i == self.steps:
                loss = float(evaluate(state["params"], self.corpus.validation))
                history.append([i, float(state["loss"]), loss])
        return Run(history, None, **counts(state["opt_state"]))


Task = Digits | Language


def train(task: Task, method: str, rate: float, seed: int) -> Run:
    """One run, from the cache if it is there."""
    storage = STORAGES.get(method)
    said = repr((task.said, method, storage, STATISTICS_EVERY, REFRESH, rate, seed))
    kept = RUNS / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    if kept.exists():
        return Run(**json.loads(kept.read_text())["run"])
    run = task.train(method, rate, seed)
    RUNS.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(".part")
    unfinished.write_text(json.dumps({"settings": said, "run": run._asdict()}))
    unfinished.rename(kept)
    tqdm.write(f"{task.name}, {method}, {rate:g}, seed {seed}: {run.loss:.4f}", file=sys.stderr)
    return run


def tune(task: Task, method: str, seed: int) -> dict[float, float]:
    """Losses by learning rate, on a grid that grows by factors of 2 until the best is inside."""
    found: dict[float, float] = {}
    todo = list(task.rates)
    while todo:
        for rate in todo:
            loss = train(task, method, rate, seed).loss
            found[rate] = loss if math.isfinite(loss) else math.inf
        best, low, high = best_of(found), min(found), max(found)
        todo = [low / 2] if best == low else [2 * high] if best == high else []
    return dict(sorted(found.items()))


def best_of(found: dict[float, float]) -> float:
    """The learning rate with the smallest loss."""
    return min(found, key=found.__getitem__)


def compare(task: Task, seed: int) -> tuple[str, dict[str, Any]]:
    """Everything about one task: its part of the page and its numbers."""
    tuning = {method: tune(task, method, seed) for method in ("float32", ALONE)}
    rates = {m: best_of(tuning[ALONE if m == ALONE else "float32"]) for m in (*STORAGES, ALONE)}
    runs = {m: [train(task, m, rate, s) for s in SEEDS] for m, rate in rates.items()}
    sizes = {m: factor_bytes(task.state(m)) for m in rates}
    dense, vq = (np.array([run.loss for run in runs[m]]) for m in ("float32", "VQ"))
    rows = []
    for method, found in runs.items():
        losses = np.array([run.loss for run in found])
        training = np.array([run.history[-1][1] for run in found])
        behind = losses - dense  # seed by seed: same start, same batches
        row = [
            method,
            f"{losses.mean():.4f} ({ends(losses, '.4f')})",
            "" if method == "float32" else f"{behind.mean():+.4f} ({ends(behind, '+.4f')})",
            "" if method == "VQ" else f"{(losses < vq).sum()} of {len(SEEDS)}",
            f"{training.mean():.4f} ({ends(training, '.4f')})",
        ]
        if isinstance(task, Digits):
            accuracies = np.array([100 * (run.accuracy or 0) for run in found])
            row.append(f"{accuracies.mean():.2f} ({ends(accuracies, '.2f')})")
        refreshes = sum(run.refreshes for run in found)
        share = (
            f"{100 * sum(run.indefinite for run in found) / refreshes:.0f} %" if refreshes else ""
        )
        size = sizes[method]
        ratio = f"{sizes['float32'] / size:.2f}" if size else ""
        row += [f"{size:,}", ratio, share, f"{sum(run.failures for run in found)}"]
        rows.append(row)
    titles = [
        "factors and roots",
        f"{task.held_out} loss, mean (range)",
        "beyond float32, mean (range)",
        "below VQ, seeds",
        "training loss, mean (range)",
        *(["accuracy, % (range)"] if isinstance(task, Digits) else []),
        "bytes of factors and roots",
        "float32 / this",
        "roots of indefinite factors",
        "failed Cholesky",
    ]
    grids = "; ".join(
        f"{'Shampoo, float32' if method == 'float32' else method}: "
        + ", ".join(f"{rate:g} → {loss:.4f}" for rate, loss in losses.items())
        + f"; taken: {best_of(losses):g}"
        for method, losses in tuning.items()
    )
    page = (
        f"## {task.title}\n\nLearning rates, seed {seed}, {task.held_out} loss. {grids}.\n\n"
        + _report.table(titles, rows)
    )
    results = {
        "tuning": tuning,
        "rates": rates,
        "bytes": sizes,
        "runs": {method: [run._asdict() for run in found] for method, found in runs.items()},
    }
    return page, results


def ends(values: np.ndarray, form: str) -> str:
    """The smallest and the largest."""
    return f"{values.min():{form}} … {values.max():{form}}"


def draw(found: dict[str, tuple[Task, dict[str, Any]]]) -> Figure:
    """For every task both losses over steps, and the held-out loss at the end seed by seed."""
    figure = Figure(figsize=(14, 4.4 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 3, squeeze=False)
    for (*curves, final), (task, results) in zip(axes, found.values(), strict=True):
        held_out = f"{task.held_out} loss"
        for i, (method, runs) in enumerate(results["runs"].items()):
            lines = np.array([run["history"] for run in runs])  # (seeds, points, 3)
            color, style = COLORS[method], "--" if method == ALONE else "-"
            for axis, values in zip(curves, (lines[..., 1], lines[..., 2]), strict=True):
                steps = lines[0, :, 0]
                axis.plot(steps, values.mean(0), style, color=color, label=method)
                axis.fill_between(
                    steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0
                )
            last = lines[:, -1, 2]
            final.plot([i] * len(last), last, "o", color=color, alpha=0.6)
            final.plot([i - 0.3, i + 0.3], [last.mean()] * 2, color=color)
        for axis, label in zip(curves, ("training loss", held_out), strict=True):
            axis.set(title=task.title, xlabel="step", ylabel=label, yscale=task.scale)
        final.set(title="At the end: seeds and their mean", ylabel=held_out)
        final.set_xticks(
            range(len(results["runs"])),
            [textwrap.fill(name, 7) for name in results["runs"]],
            fontsize="small",
        )
        for axis in (*curves, final):
            axis.grid(alpha=0.3)
    lines, names = axes[0, 0].get_legend_handles_labels()
    title = f"mean and range of {len(SEEDS)} seeds"
    figure.legend(lines, names, title=title, loc="outside lower center", ncols=len(names))
    return figure


def main() -> None:
    """Runs everything and writes tables, numbers and figure."""
    args = _report.arguments(__doc__, full="the language model as well")
    tasks: list[Callable[[], Task]] = [Digits, *([Language] if args.full else [])]
    pages, found = [], {}
    for make in tasks:
        task = make()
        page, results = compare(task, args.seed)
        pages.append(page)
        found[task.name] = (task, results)
    head = (
        f"Shampoo on AdamW, statistics every {STATISTICS_EVERY} steps, roots every {REFRESH}; "
        f"seeds {', '.join(map(str, SEEDS))}. Factors with fewer than 4096 elements stay in "
        "float32 in all rows. Runs of one seed start from the same parameters and see the same "
        'batches; "beyond float32" is taken seed by seed.'
    )
    settings = {
        "statistics_every": STATISTICS_EVERY,
        "refresh": REFRESH,
        "seeds": SEEDS,
        "storages": {name: repr(storage) for name, storage in STORAGES.items()},
    }
    _report.write(
        args,
        "shampoo_4bit",
        "Training with 4-bit Shampoo",
        "\n\n".join([head, *pages]),
        settings,
        {name: results for name, (_, results) in found.items()},
        draw(found),
    )


if __name__ == "__main__":
    main()
