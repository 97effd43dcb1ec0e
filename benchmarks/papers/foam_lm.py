"""FOAM, stale Shampoo and DR-Shampoo on the example's language model.

    python -m benchmarks.papers.foam_lm           # two seeds of fewer steps, about 15 minutes
    python -m benchmarks.papers.foam_lm --full    # three seeds of 400 steps

Every run is `examples/train_lm.py`'s model, data and schedule with Adam-grafted Shampoo at one
learning rate, tuned for stale Shampoo on the printed grid. For the three published settings of
FOAM, unretuned, and both roots: the eigendecompositions executed against the fixed schedule with
the same f, the time that checks and refreshes take, and the validation loss. Then a grid over
threshold and largest damping, for a setting that needs at most a fifth of the decompositions at a
loss no worse.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax

from . import _report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lm  # pyright: ignore[reportMissingImports]

PUBLISHED = {  # f, τ, ε_max, ε0: the paper's Table 6 and section 7
    "ViT": (20, 0.75, 3e-7, 1e-9),
    "Conformer": (50, 0.4, 1e-7, 1e-9),
    "GPT-2": (75, 0.4, 1e-10, 1e-12),
}
RATES = (2e-3, 4e-3, 8e-3)
GRID_THRESHOLDS = (0.4, 0.75)
GRID_DAMPINGS = (1e-6, 1e-5, 1e-4)
GRID_PERIOD = 20
FACTORS = 2 * 6 * train_lm.Config.depth


class Run(NamedTuple):
    """What one training run leaves."""

    loss: float
    history: list[tuple[int, float, float, float]]  # step, seconds, ε (geometric mean), h (median)
    decompositions: int
    rejected: int
    seconds: float


def factors_of(state: Any) -> list[Any]:
    """Every factor in an optimizer's state."""
    is_factor = lambda x: hasattr(x, "refreshes")  # noqa: E731
    return [x for x in jax.tree.leaves(state, is_leaf=is_factor) if is_factor(x)]


def train(make: Any, rate: float, steps: int, seed: int, corpus: Any, watch_every: int) -> Run:
    """Trains the example's model with an optimizer from `make(schedule, weight_decay=…)`."""
    train_lm.OPTIMIZERS["this"] = make
    config = dataclasses.replace(
        train_lm.Config("this", rate, corpus.digest), steps=steps, seed=seed
    )
    state, step, evaluate = train_lm.make_run(config, corpus)
    compiled = step.lower(state, corpus.train).compile()
    history, seconds = [], 0.0
    begin = time.perf_counter()
    for i in tqdm(range(1, steps + 1), leave=False, file=sys.stderr):
        state = compiled(state, corpus.train)
        if i % watch_every == 1 or i == steps:
            jax.block_until_ready(state)
            seconds += time.perf_counter() - begin
            factors = factors_of(state["opt_state"])
            damping = np.concatenate([np.ravel(f.damping) for f in factors])
            proxy = np.concatenate([np.ravel(f.proxy) for f in factors])
            mean = float(np.exp(np.mean(np.log(damping))))
            history.append((i, seconds, mean, float(np.median(proxy))))
            begin = time.perf_counter()
    count = lambda field: sum(int(np.sum(getattr(f, field))) for f in factors)  # noqa: E731
    loss = float(evaluate(state["params"], corpus.validation))
    return Run(loss, history, count("refreshes"), count("rejected"), seconds)


def stale(period: int, root: int, eps: float) -> Any:
    """Shampoo refreshed on a fixed schedule, otherwise as FOAM."""
    return functools.partial(
        curvax.shampoo,
        refresh=curvax.every(period, offset=1),
        statistics_every=1,
        b2=0.995,
        eps=eps,
        root=root,
        graft="adam",
        base=None,
        damping="absolute",
        initial=0.0,
        block_size=None,
    )


def foam(period: int, threshold: float, most: float, eps: float, root: int) -> Any:
    """FOAM with one setting."""
    return functools.partial(
        curvax.foam,
        check_every=period,
        threshold=threshold,
        max_damping=most,
        eps=eps,
        root=root,
    )


def residual(period: int, threshold: float, eps: float, root: int) -> Any:
    """DR-Shampoo with one setting."""
    return functools.partial(
        curvax.dr_shampoo, check_every=period, threshold=threshold, eps=eps, root=root
    )


def costs(corpus: Any, root: int) -> tuple[float, float]:
    """Milliseconds of one check of all factors that refreshes nothing, and of refreshing them."""
    rate, times = 1e-4, []
    for make in (
        foam(10**6, 1.0, 1.0, 1e-9, root),  # nothing is due
        foam(1, 1e30, 1e20, 1e-9, root),  # all checked, none refreshed
        stale(1, root, 1e-9),  # all refreshed, none checked
    ):
        train_lm.OPTIMIZERS["this"] = make
        config = dataclasses.replace(train_lm.Config("this", rate, corpus.digest), steps=20)
        state, step, _ = train_lm.make_run(config, corpus)
        compiled, timed = step.lower(state, corpus.train).compile(), []
        for _ in range(12):
            begin = time.perf_counter()
            state = jax.block_until_ready(compiled(state, corpus.train))
            timed.append(1e3 * (time.perf_counter() - begin))
        times.append(statistics.median(timed[2:]))
    return times[1] - times[0], times[2] - times[0]


def summary(runs: list[Run]) -> str:
    """Mean of the losses, with their range."""
    losses = [run.loss for run in runs]
    return f"{np.mean(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})"


def main() -> None:
    """Runs everything and writes table, numbers and figure."""
    args = _report.arguments(__doc__, "three seeds of 400 steps")
    steps, seeds = (400, (1, 2, 3)) if args.full else (200, (1, 2, 3))
    corpus = train_lm.read_corpus(None, train_lm.Config.context)
    go = functools.partial(train, steps=steps, corpus=corpus, watch_every=5)

    tuning = {rate: go(stale(20, 2, 1e-9), rate, seed=args.seed).loss for rate in RATES}
    rate = min(tuning, key=tuning.__getitem__)
    check_ms, refresh_ms = costs(corpus, 2)
    ms = lambda runs: 1e3 * np.mean([r.seconds for r in runs]) / steps  # noqa: E731

    rows, results, curves = [], {}, {}

    def compare(name: str, makes: dict[str, Any], period: int) -> dict[str, list[Run]]:
        scheduled = FACTORS * len(range(0, steps, period))
        found = {}
        for kind, make in makes.items():
            runs = found[kind] = [go(make, rate, seed=seed) for seed in seeds]
            share = np.mean([r.decompositions for r in runs]) / scheduled
            checks = 0 if kind == "stale" else scheduled
            rows.append(
                [
                    name,
                    kind,
                    f"{np.mean([r.decompositions for r in runs]):.0f} of {scheduled}",
                    f"{100 * share:.0f} %",
                    summary(runs),
                    f"{ms(runs):.0f}",
                    f"{checks / FACTORS * check_ms / 1e3:.1f}",
                    f"{share * scheduled / FACTORS * refresh_ms / 1e3:.1f}",
                ]
            )
            results[f"{name} {kind}"] = [run._asdict() for run in runs]
            tqdm.write(" | ".join(rows[-1]), file=sys.stderr)
        return found

    for name, (period, threshold, most, eps) in PUBLISHED.items():
        for root in (2, 4):
            makes = {
                "stale": stale(period, root, eps),
                "FOAM": foam(period, threshold, most, eps, root),
            }
            if name == "ViT":
                makes["DR, τ = 0.1"] = residual(period, 0.1, eps, root)
            found = compare(f"{name}, f = {period}, p = {root}", makes, period)
            if root == 2:
                curves |= {f"{name}: {kind}": runs for kind, runs in found.items()}

    best = summary_of_grid(go, rate, args.seed, steps, results)
    body = "\n\n".join(
        [
            "Learning rate, tuned for stale Shampoo (f = 20, p = 2): "
            + ", ".join(f"{r:g} → {loss:.3f}" for r, loss in tuning.items())
            + f"; taken: {rate:g}.",
            f"One check of all {FACTORS} factors that refreshes nothing takes {check_ms:.0f} ms, "
            f"refreshing them all {refresh_ms:.0f} ms.",
            _report.table(
                [
                    "setting",
                    "policy",
                    "decompositions",
                    "share",
                    f"validation loss, mean of {len(seeds)} seeds (range)",
                    "ms/step",
                    "s in checks",
                    "s in refreshes",
                ],
                rows,
            ),
            best,
        ]
    )
    settings = {"steps": steps, "seeds": seeds, "learning_rate": rate, "tuning": tuning}
    title = "FOAM, stale Shampoo and DR-Shampoo on the language model"
    _report.write(args, "foam_lm", title, body, settings, results, draw(curves))


def summary_of_grid(go: Any, rate: float, seed: int, steps: int, results: dict[str, Any]) -> str:
    """FOAM over a grid of thresholds and largest dampings, p = 2, one seed."""
    scheduled = FACTORS * len(range(0, steps, GRID_PERIOD))
    fixed = go(stale(GRID_PERIOD, 2, 1e-9), rate, seed=seed)
    rows = [["stale", "", f"{fixed.decompositions}", "100 %", f"{fixed.loss:.4f}"]]
    for threshold in GRID_THRESHOLDS:
        for most in GRID_DAMPINGS:
            run = go(foam(GRID_PERIOD, threshold, most, 1e-9, 2), rate, seed=seed)
            share = 100 * run.decompositions / scheduled
            rows.append(
                [
                    f"{threshold:g}",
                    f"{most:g}",
                    f"{run.decompositions}",
                    f"{share:.0f} %",
                    f"{run.loss:.4f}",
                ]
            )
            results[f"grid {threshold} {most}"] = run._asdict()
            tqdm.write(" | ".join(rows[-1]), file=sys.stderr)
    head = f"Grid at f = {GRID_PERIOD}, p = 2, ε0 = 1e-9, seed {seed}:\n\n"
    return head + _report.table(
        ["threshold τ", "largest damping ε_max", "decompositions", "share", "validation loss"], rows
    )


def draw(curves: dict[str, list[Run]]) -> Figure:
    """Damping and h over steps, for p = 2."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    foams = {name: runs for name, runs in curves.items() if "stale" not in name}
    for color, (name, runs) in zip(_report.COLORS, foams.items(), strict=False):
        steps = [line[0] for line in runs[0].history]
        for axis, column in ((left, 2), (right, 3)):
            if axis is left and "DR" in name:
                continue
            values = np.array([[line[column] for line in run.history] for run in runs])
            axis.plot(steps, values.mean(0), color=color, label=name)
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
    left.set(xlabel="step", ylabel="damping ε in use (geometric mean over factors)", yscale="log")
    right.set(xlabel="step", ylabel="FOAM's h, DR's residual (median over factors)", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    right.legend(title="p = 2, range of the seeds", frameon=False)
    return figure


if __name__ == "__main__":
    main()
