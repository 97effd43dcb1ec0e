"""Training runs on a small version of `examples/train_lm.py`'s model, shared by several scripts.

Text, model, schedule and weight decay are the example's, at the sizes below; low-rank methods have
a quarter of the width as rank. The learning rate of the matrices is tuned on a seed of its own, on
a grid that grows by factors of 2 until the best value has a worse neighbor on either side; then
three other seeds are run at the best value. Parameters that are no matrices have AdamW at AdamW's
own tuned learning rate in every method, so that all methods have one number to tune. Runs of one
seed start from the same parameters and see the same batches.

Runs that have finished are kept under runs/small_lm, and no script repeats them. They know nothing
of changes in the library: delete the folder after one that changes numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.axes import Axes
from tqdm import tqdm

import curvax

from . import _report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lm  # pyright: ignore[reportMissingImports]

SIZES = {"steps": 200, "batch": 16, "context": 64, "width": 64, "depth": 2}
EVAL_EVERY = 10
VALIDATION = 128  # windows, spread over the example's
GRID = (8e-3, 1.6e-2, 3.2e-2)
SEEDS = (1, 2, 3)
RUNS = Path("runs", "small_lm")

RANK = SIZES["width"] // 4  # as 128 of 512 in the 60M LLaMA of RACS and Alice
PERIOD = 20  # of subspaces


# What is trained.


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer: `make(rate, weight_decay=…, adam_learning_rate=…, **options)`."""

    make: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def call(self) -> str:
        """What is called, without weight decay and Adam's learning rate."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"{self.make.__name__}(rate{options})"

    @property
    def said(self) -> str:
        """What decides its numbers: the call, and the source of a function of this folder."""
        own = self.make.__module__.startswith(("benchmarks.", "__main__"))
        return f"{self.call}\n{inspect.getsource(self.make)}" if own else self.call


def adamw(
    rate: Any, *, weight_decay: float, adam_learning_rate: Any
) -> optax.GradientTransformation:
    """AdamW for all parameters."""
    del adam_learning_rate
    return optax.adamw(rate, weight_decay=weight_decay)


def shampoo_on_adamw(
    rate: Any, *, weight_decay: float, **options: Any
) -> optax.GradientTransformation:
    """Shampoo whose direction AdamW takes for its gradient."""
    base = functools.partial(optax.adamw, weight_decay=weight_decay)
    return curvax.shampoo(rate, base=base, adam_weight_decay=weight_decay, **options)


LOW_RANK = {"rank": RANK, "refresh": PERIOD}
ALICE = {**LOW_RANK, "leading": RANK * 40 // 128}  # 40 of 128 at 60M

# Every public optimizer, with its own defaults but for periods that fit the length of the runs.
METHODS = {
    "AdamW": Method(adamw),
    "Muon": Method(curvax.muon),
    "OSGDM": Method(curvax.osgdm),
    "SWAN": Method(curvax.swan),
    "RACS": Method(curvax.racs),
    "ASGO": Method(curvax.asgo),
    "DASGO": Method(curvax.dasgo),
    "Shampoo": Method(shampoo_on_adamw, {"statistics_every": 1, "refresh": 10}),
    "FOAM": Method(curvax.foam),
    "DR-Shampoo": Method(curvax.dr_shampoo),
    "SOAP": Method(curvax.soap),
    "Eigen-Adam": Method(curvax.eigen_adam),
    "GaLore": Method(curvax.galore, LOW_RANK),
    "Fira": Method(curvax.fira, LOW_RANK),
    "Alice": Method(curvax.alice, ALICE),
    "Apollo": Method(curvax.apollo, LOW_RANK),
    "SUMO": Method(curvax.sumo, LOW_RANK),
}
ADAMW = METHODS["AdamW"]


# What comes of it.


class Run(NamedTuple):
    """What one training run leaves."""

    history: list[list[float]]  # step, smoothed training loss, validation loss
    seconds: float  # of the steps
    watched: list[Any]  # what a `Watch` saw at every point of the history

    @property
    def loss(self) -> float:
        """On validation data, at the end."""
        return self.history[-1][2]

    def steps_to(self, target: float) -> float:
        """Steps until the validation loss is down to `target`, interpolated; infinity if never."""
        before = None
        for step, _, loss in self.history:
            if loss <= target:
                if before is None:
                    return step
                return step - (step - before[0]) * (target - loss) / (before[1] - loss)
            before = step, loss
        return math.inf


class Found(NamedTuple):
    """A method at its best learning rate."""

    tuning: dict[float, float]  # validation loss by learning rate
    runs: list[Run]  # by seed
    state_bytes: int

    @property
    def rate(self) -> float:
        """The best learning rate."""
        return best_of(self.tuning)

    @property
    def losses(self) -> np.ndarray:
        """On validation data, at the end, by seed."""
        return np.array([run.loss for run in self.runs])

    @property
    def curves(self) -> np.ndarray:
        """Steps and validation losses, `(seeds, points, 2)`."""
        return np.array([[line[::2] for line in run.history] for run in self.runs])

    def asdict(self) -> dict[str, Any]:
        """For JSON, without what was watched."""
        runs = [{"history": run.history, "seconds": run.seconds} for run in self.runs]
        about = {"rate": self.rate, "tuning": self.tuning, "state_bytes": self.state_bytes}
        return {**about, "runs": dict(zip(SEEDS, runs, strict=True))}


class Watch(NamedTuple):
    """Something to look at in the state of a run at each evaluation."""

    name: str  # tells it from others in the cache
    look: Callable[[optax.GradientTransformation, Any], Any]  # of the optimizer and the run's state


def best_of(tuning: Mapping[float, float]) -> float:
    """The learning rate with the smallest loss."""
    return min(tuning, key=tuning.__getitem__)


# Training.


class Task:
    """Model and data."""

    def __init__(self) -> None:
        """Reads the text."""
        corpus = self.corpus = train_lm.read_corpus(None, SIZES["context"])
        self.config = train_lm.Config("this", 1.0, corpus.digest, **SIZES)
        stride = len(corpus.validation) // VALIDATION
        self.windows = corpus.validation[: stride * VALIDATION : stride]
        graph = nnx.graphdef(self.model(jax.random.key(0)))

        def loss_of(params: Any, windows: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(windows[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
            return losses.mean()

        self.loss_of = loss_of
        self.evaluate = jax.jit(loss_of)
        self.params = jax.jit(lambda key: nnx.state(self.model(key), nnx.Param))

    def model(self, key: jax.Array) -> Any:
        """The example's model, from a random key in the place of its seed."""
        return train_lm.GPT(dataclasses.replace(self.config, seed=key), self.corpus.symbols)


class Program:
    """Training with one method, compiled once for all learning rates and seeds."""

    def __init__(self, method: Method, task: Task):
        """Compiles nothing yet."""
        self.method, self.task = method, task
        self.like = jax.eval_shape(task.params, jax.random.key(0))
        self.init = jax.jit(self.optimizer(1.0, 1.0).init)

        def step(
            state: Any, text: jax.Array, seed: jax.Array, rate: jax.Array, adam_rate: jax.Array
        ) -> Any:
            config = task.config
            key = jax.random.fold_in(jax.random.key(seed), state["step"])
            starts = jax.random.randint(key, (config.batch, 1), 0, len(text) - config.context)
            windows = text[starts + jnp.arange(config.context + 1)]
            loss, grads = jax.value_and_grad(task.loss_of)(state["params"], windows)
            updates, opt_state = self.optimizer(rate, adam_rate).update(
                grads, state["opt_state"], state["params"]
            )
            count = state["step"] + 1
            return {
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
                "step": count,
                "loss": state["loss"] + (loss - state["loss"]) / jnp.minimum(count, 20),
            }

        self.step = jax.jit(step, donate_argnums=0)
        self.compiled: Any = None

    def optimizer(self, rate: Any, adam_rate: Any) -> optax.GradientTransformation:
        """The optimizer, with the example's schedule and weight decay; rates may be traced."""

        def make(schedule: Any, weight_decay: float) -> optax.GradientTransformation:
            return self.method.make(
                lambda count: rate * schedule(count),
                weight_decay=weight_decay,
                adam_learning_rate=lambda count: adam_rate * schedule(count),
                **self.method.options,
            )

        train_lm.OPTIMIZERS["this"] = make
        return self.task.config.make_optimizer()

    def train(self, rate: float, adam_rate: float, seed: int, watch: Watch | None) -> Run:
        """One run."""
        params = self.task.params(jax.random.key(seed))
        state: Any = {"params": params, "opt_state": self.init(params)}
        state |= {"step": jnp.zeros((), jnp.int32), "loss": jnp.zeros(())}
        given = self.task.corpus.train, *map(jnp.asarray, (seed, rate, adam_rate))
        if self.compiled is None:  # here, so that it is not timed
            self.compiled = self.step.lower(state, *given).compile()
        steps = self.task.config.steps
        look = None
        if watch is not None:
            look = jax.jit(functools.partial(watch.look, self.optimizer(1.0, 1.0)))
        history, watched, seconds = [], [], 0.0
        begin = time.perf_counter()
        for i in tqdm(range(1, steps + 1), leave=False, file=sys.stderr, position=1):
            state = self.compiled(state, *given)
            if i % EVAL_EVERY and i < steps:
                continue
            loss = float(state["loss"])
            seconds += time.perf_counter() - begin
            history.append([i, loss, float(self.task.evaluate(state["params"], self.task.windows))])
            if look is not None:
                watched.append(jax.tree.map(lambda x: np.asarray(x).tolist(), look(state)))
            begin = time.perf_counter()
        return Run(history, seconds, watched)


class Study:
    """Trains methods, or looks into the cache."""

    def __init__(self, seed: int, methods: int):
        """Takes the seed of the tuning and the number of methods to be tuned, for the display."""
        self.seed, self.task = seed, Task()
        self.programs: dict[str, Program] = {}
        self.found: dict[str, Found] = {}
        each = len(GRID) + len(SEEDS)
        self.bar = tqdm(total=methods * each, unit="run", file=sys.stderr, dynamic_ncols=True)

    def program(self, method: Method) -> Program:
        """Compiled once."""
        if method.said not in self.programs:
            self.programs[method.said] = Program(method, self.task)
        return self.programs[method.said]

    def train(self, method: Method, rate: float, seed: int, watch: Watch | None = None) -> Run:
        """One run, from the cache if it is there."""
        alone = method is ADAMW
        adam_rate = rate if alone else self.find(ADAMW).rate
        config = dataclasses.asdict(self.task.config) | {
            "optimizer": method.said,
            "learning_rate": rate,
            "seed": seed,
            "adam_learning_rate": adam_rate,
            "eval_every": EVAL_EVERY,
            "validation": VALIDATION,
            "watch": watch and watch.name,
        }
        said = json.dumps(config)
        kept = RUNS / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
        self.bar.set_postfix_str(f"{method.make.__name__}, {rate:g}, seed {seed}")
        if kept.exists():
            run = Run(**json.loads(kept.read_text())["run"])
        else:
            run = self.program(method).train(rate, adam_rate, seed, watch)
            RUNS.mkdir(parents=True, exist_ok=True)
            unfinished = kept.with_suffix(".part")
            unfinished.write_text(json.dumps({"config": config, "run": run._asdict()}))
            unfinished.rename(kept)
        self.bar.update()
        return run

    def tune(self, method: Method) -> dict[float, float]:
        """Losses by learning rate, on a grid that grows until the best is inside."""
        tuning: dict[float, float] = {}
        todo = list(GRID)
        while todo:
            for rate in todo:
                loss = self.train(method, rate, self.seed).loss
                tuning[rate] = loss if math.isfinite(loss) else math.inf
            best, low, high = best_of(tuning), min(tuning), max(tuning)
            todo = [low / 2] if best == low else [2 * high] if best == high else []
            self.bar.total += len(todo)
        return dict(sorted(tuning.items()))

    def find(self, method: Method, watch: Watch | None = None) -> Found:
        """A method at its best learning rate, on all seeds."""
        key = f"{method.said} {watch and watch.name}"
        if key not in self.found:
            tuning = self.tune(method)
            runs = [self.train(method, best_of(tuning), seed, watch) for seed in SEEDS]
            program = self.program(method)
            size = curvax.state_bytes(program.optimizer(1.0, 1.0), program.like)
            self.found[key] = Found(tuning, runs, size)
        return self.found[key]

    def find_all(self, methods: Mapping[str, Method]) -> dict[str, Found]:
        """By name."""
        return {name: self.find(method) for name, method in methods.items()}

    def settings(self, methods: Mapping[str, Method]) -> dict[str, Any]:
        """For the record."""
        sizes = dataclasses.asdict(self.task.config)
        chosen = ("optimizer", "learning_rate", "seed")
        return {name: value for name, value in sizes.items() if name not in chosen} | {
            "tuning_seed": self.seed,
            "seeds": SEEDS,
            "grid": GRID,
            "adam_learning_rate": self.find(ADAMW).rate,
            "methods": {name: method.said for name, method in methods.items()},
        }

    def head(self) -> str:
        """What all pages say first."""
        config = self.task.config
        size = sum(x.size for x in jax.tree.leaves(self.program(ADAMW).like))
        return (
            f"GPT of `examples/train_lm.py` with {config.depth} layers of width {config.width} "
            f"({size:,} parameters), {config.steps} steps of {config.batch} × {config.context} "
            f"characters, weight decay {config.weight_decay:g}, the example's schedule; loss on "
            f"{VALIDATION} windows of the held-out text, in nats per character. Learning rate of "
            f"the matrices tuned on seed {self.seed}: powers of 2 around {GRID[len(GRID) // 2]:g} "
            "until the best has a worse neighbor on either side. Then seeds "
            f"{', '.join(map(str, SEEDS))}. What is no matrix has AdamW at AdamW's own best rate, "
            f"{self.find(ADAMW).rate:g}."
        )


# Tables and figures.

LINES = ("-", "--", ":", "-.")


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and the smallest and the largest."""
    values = np.array(list(values))
    return f"{values.mean():{form}} ({values.min():{form}} … {values.max():{form}})"


def tuning_table(found: Mapping[str, Found]) -> str:
    """Losses by learning rate, the best bold."""
    rates = sorted({rate for x in found.values() for rate in x.tuning})
    rows = []
    for name, x in found.items():
        losses = {rate: f"{loss:.3f}" for rate, loss in x.tuning.items()}
        losses[x.rate] = f"**{losses[x.rate]}**"
        rows.append([name, *(losses.get(rate, "") for rate in rates)])
    return _report.table(["method", *(f"{rate:g}" for rate in rates)], rows)


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colors and line styles, no pair of them twice."""
    pairs = itertools.product(LINES, _report.COLORS)
    return {name: (color, style) for name, (style, color) in zip(names, pairs, strict=False)}


def draw_curves(
    axis: Axes, found: Mapping[str, Found], look: Mapping[str, tuple[str, str]], shade: bool = True
) -> None:
    """Validation loss over steps: the mean of the seeds, with their range if `shade`."""
    for name, x in found.items():
        (steps, losses), (color, style) = np.moveaxis(x.curves, -1, 0), look[name]
        axis.plot(steps[0], losses.mean(0), style, color=color, label=f"{name}, {x.rate:g}")
        if shade:
            low, high = losses.min(0), losses.max(0)
            axis.fill_between(steps[0], low, high, color=color, alpha=0.15, lw=0)
    # The first fifth is the fall from the start, which would flatten all that follows.
    after = [x.curves[:, SIZES["steps"] // 5 // EVAL_EVERY :, 1] for x in found.values()]
    top = np.nanmax([np.nanmax(x) for x in after if x.size] or [np.nan])
    if np.isfinite(top):
        axis.set_ylim(top=top)
    axis.set(xlabel="step", ylabel="validation loss (nats per character)")
    axis.grid(alpha=0.3)
