"""FOAM, stale Shampoo and DR-Shampoo on the example's language model.

    python -m benchmarks.papers.foam_lm           # one seed, about 50 minutes
    python -m benchmarks.papers.foam_lm --full    # three seeds, about 100 minutes

Every run is `examples/train_lm.py`'s model in the size of `_model.py`, on its data, with
Adam-grafted Shampoo at one learning rate, tuned for stale Shampoo on the printed grid. For the
three published settings of FOAM, unretuned, and both roots: the eigendecompositions executed
against the fixed schedule with the same f, what checks and refreshes cost, and the validation loss.
Then a grid over f, threshold and largest damping, in runs of 200 and of 600 steps, on a seed of its
own, for a setting that needs at most a fifth of the decompositions at a loss no worse; and that
setting on the other seeds. Last the same for ASGO, whose one root is due at every step and
damped by 1e-6, with FOAM's policy checked at every step.

Runs that have finished are kept under runs/foam_lm and are not repeated.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
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

from . import _model, _report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lm

PUBLISHED = {  # f, τ, ε_max, ε0: the paper's Table 6 and section 7
    "ViT": (20, 0.75, 3e-7, 1e-9),
    "Conformer": (50, 0.4, 1e-7, 1e-9),
    "GPT-2": (75, 0.4, 1e-10, 1e-12),
}
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
GRID = {  # for each number of steps and f: τ and ε_max
    (200, 20): tuple(itertools.product((0.4, 0.75), (1e-6, 1e-5, 1e-4))),
    (200, 2): tuple(itertools.product((0.4, 0.75), (1e-8, 1e-7))),
    (600, 5): ((0.4, 1e-8), (0.75, 3e-9), (0.75, 1e-8), (0.75, 1e-7)),
}
ASGO_RATES = (3.2e-2, 6.4e-2, 1.28e-1)
ASGO_GRID = ((0.1, 3e-6), (0.2, 3e-6), (0.1, 1e-5), (0.4, 1e-5), (0.75, 1e-5), (0.4, 1e-4))
MOST_SHARE = 0.2  # of the fixed schedule's decompositions
RUNS = Path("runs", "foam_lm")
STEPS = 200
FACTORS = 2 * (6 * _model.SIZES["depth"] + 1)  # attention's four, two of the MLP, the output


class Run(NamedTuple):
    """What one training run leaves."""

    loss: float
    history: list[list[float]]  # step, ε (geometric mean), h (median)
    decompositions: int
    checks: int
    rejected: int


def factors_of(state: Any) -> list[Any]:
    """Every factor in an optimizer's state."""
    is_factor = lambda x: hasattr(x, "refreshes")  # noqa: E731
    return [x for x in jax.tree.leaves(state, is_leaf=is_factor) if is_factor(x)]


def train(make: Any, rate: float, steps: int, seed: int, corpus: Any) -> Run:
    """Trains the example's model with an optimizer from `make(schedule, weight_decay=…)`."""
    said = repr((make.func.__name__, make.keywords, rate, steps, seed, corpus.digest))
    kept = RUNS / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    if kept.exists():
        return Run(**json.loads(kept.read_text())["run"])
    settings = {**_model.SIZES, "steps": steps, "seed": seed}
    config = train_lm.Config("this", rate, corpus.digest, **settings)
    train_lm.OPTIMIZERS["this"] = make
    state, step, evaluate = train_lm.make_run(config, corpus)
    compiled = step.lower(state, corpus.train).compile()
    history, factors = [], []
    for i in tqdm(range(1, steps + 1), leave=False, file=sys.stderr):
        state = compiled(state, corpus.train)
        if i % 5 == 1 or i == steps:
            factors = factors_of(state["opt_state"])
            damping = np.concatenate([np.ravel(f.damping) for f in factors])
            proxy = np.concatenate([np.ravel(f.proxy) for f in factors])
            mean = float(np.exp(np.mean(np.log(damping))))
            history.append([i, mean, float(np.median(proxy))])
    count = lambda field: sum(int(np.sum(getattr(f, field))) for f in factors)  # noqa: E731
    loss = float(evaluate(state["params"], corpus.validation))
    run = Run(loss, history, count("refreshes"), count("checks"), count("rejected"))
    RUNS.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(".part")
    unfinished.write_text(json.dumps({"settings": said, "run": run._asdict()}))
    unfinished.rename(kept)
    return run


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
        damping_mode="absolute",
        initial=0.0,
        matrices=curvax.MatrixRule(block_size=None),
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


def asgo(refresh: Any = 1) -> Any:
    """ASGO with its root refreshed by a policy."""
    return functools.partial(curvax.asgo, refresh=refresh)


def asgo_foam(threshold: float, most: float) -> Any:
    """ASGO with FOAM's policy, checked at every step."""
    return asgo(curvax.policies.foam(1, threshold, max_damping=most))


def residual(period: int, threshold: float, eps: float, root: int) -> Any:
    """DR-Shampoo with one setting."""
    return functools.partial(
        curvax.dr_shampoo, check_every=period, threshold=threshold, eps=eps, root=root
    )


def costs(corpus: Any, root: int) -> tuple[float, float, float]:
    """Milliseconds of a step with nothing due, and what checking or refreshing all factors adds."""
    programs = []
    for make in (
        foam(10**6, 1.0, 1.0, 1e-9, root),  # nothing is due
        foam(1, 1e30, 1e20, 1e-9, root),  # all checked, none refreshed
        stale(1, root, 1e-9),  # all refreshed, none checked
    ):
        config = train_lm.Config("this", 1e-4, corpus.digest, **_model.SIZES, steps=STEPS)
        train_lm.OPTIMIZERS["this"] = make
        state, step, _ = train_lm.make_run(config, corpus)
        compiled = step.lower(state, corpus.train).compile()
        programs.append([compiled, compiled(state, corpus.train), []])
    for _ in tqdm(range(15), desc="step times", leave=False, file=sys.stderr):
        for program in programs:
            begin = time.perf_counter()
            program[1] = jax.block_until_ready(program[0](program[1], corpus.train))
            program[2].append(1e3 * (time.perf_counter() - begin))
    idle, checked, refreshed = (statistics.median(times[2:]) for _, _, times in programs)
    return idle, checked - idle, refreshed - idle


def summary(runs: list[Run]) -> str:
    """Mean of the losses, with their range."""
    losses = [run.loss for run in runs]
    return f"{np.mean(losses):.4f} ({min(losses):.4f}-{max(losses):.4f})"


def scheduled(steps: int, period: int) -> int:
    """Decompositions of the fixed schedule."""
    return FACTORS * len(range(0, steps, period))


TITLES = (
    "setting",
    "policy",
    "decompositions",
    "share",
    "validation loss (range)",
    "s in checks",
    "s in refreshes",
    "s, whole run",
)


class Table:
    """Rows of the comparison, and the runs behind them."""

    def __init__(self, go: Any, seeds: tuple[int, ...], steps: int, times: dict[int, Any]):
        """Takes how to train, on which seeds, and what steps, checks and refreshes cost."""
        self.go, self.seeds, self.steps, self.times = go, seeds, steps, times
        self.rows: list[list[str]] = []
        self.runs: dict[str, list[Run]] = {}

    def add(self, setting: str, policy: str, make: Any, period: int, root: int) -> list[Run]:
        """Trains with one policy on every seed."""
        runs = self.runs[f"{setting}: {policy}"] = [self.go(make, seed=seed) for seed in self.seeds]
        most, (idle, check, refresh) = scheduled(self.steps, period), self.times[root]
        done = np.mean([run.decompositions for run in runs])
        checks = 0.0 if policy == "stale" else np.mean([run.checks for run in runs])
        in_checks, in_refreshes = (
            x / FACTORS * ms / 1e3 for x, ms in ((checks, check), (done, refresh))
        )
        self.rows.append(
            [
                setting,
                policy,
                f"{done:.0f} of {most}",
                f"{100 * done / most:.0f} %",
                summary(runs),
                f"{in_checks:.1f}",
                f"{in_refreshes:.1f}",
                f"{self.steps * idle / 1e3 + in_checks + in_refreshes:.1f}",
            ]
        )
        tqdm.write(" | ".join(self.rows[-1]), file=sys.stderr)
        return runs


def main() -> None:
    """Runs everything and writes table, numbers and figure."""
    args = _report.arguments(__doc__, "three seeds")
    steps, seeds = STEPS, (1, 2, 3) if args.full else (1,)
    corpus = train_lm.read_corpus(None, _model.SIZES["context"])
    bare = functools.partial(train, steps=steps, corpus=corpus)

    tuning = {rate: bare(stale(20, 2, 1e-9), rate, seed=args.seed).loss for rate in RATES}
    rate = min(tuning, key=tuning.__getitem__)
    go = functools.partial(bare, rate=rate)
    times = {root: costs(corpus, root) for root in (2, 4)}
    published = Table(go, seeds, steps, times)
    for name, (period, threshold, most, eps) in PUBLISHED.items():
        for root in (2, 4):
            setting = f"{name}, f = {period}, p = {root}"
            published.add(setting, "stale", stale(period, root, eps), period, root)
            make = foam(period, threshold, most, eps, root)
            published.add(setting, "FOAM", make, period, root)
            if name == "ViT":
                make = residual(period, 0.1, eps, root)
                published.add(setting, "DR, τ = 0.1", make, period, root)

    anew = functools.partial(train, rate=rate, corpus=corpus)
    grid, best = search(anew, args.seed)
    long, period, threshold, most = best
    best = best[1:]
    found = Table(functools.partial(anew, steps=long), seeds, long, times)
    setting = f"{long} steps, f = {period}, p = 2"
    pair = (
        found.add(setting, "stale", stale(period, 2, 1e-9), period, 2),
        found.add(setting, f"FOAM, {threshold:g}, {most:g}", grid_foam(*best), period, 2),
    )
    idle, check, refresh = times[2]
    body = "\n\n".join(
        [
            f"{len(seeds)} seed(s); 4-layer model of the example, {steps} steps. Learning rate, "
            "tuned for stale Shampoo (f = 20, p = 2): "
            + ", ".join(f"{r:g} → {loss:.3f}" for r, loss in tuning.items())
            + f"; taken: {rate:g}.",
            f"p = 2: a step with nothing due takes {idle:.0f} ms, checking all {FACTORS} factors "
            f"adds {check:.0f} ms, refreshing all {refresh:.0f} ms. Seconds in the tables are "
            "counts times these.",
            _report.table(TITLES, published.rows),
            f"Grid at p = 2, ε0 = 1e-9, seed {args.seed}:",
            grid,
            f"The setting of the grid with at most {100 * MOST_SHARE:g} % of the decompositions "
            "whose loss is least above that of stale Shampoo with the same f, on the seeds above:",
            _report.table(TITLES, found.rows),
            "FOAM's loss above stale Shampoo's, seed by seed: "
            + ", ".join(f"{b.loss - a.loss:+.4f}" for a, b in zip(*pair, strict=True))
            + ".",
        ]
    )
    one_sided, asgo_runs = with_asgo(bare, args.seed, seeds)
    body += "\n\n" + one_sided
    settings = {"steps": steps, "seeds": seeds, "learning_rate": rate, "tuning": tuning}
    results = {
        name: [run._asdict() for run in runs]
        for name, runs in {**published.runs, **found.runs, **asgo_runs}.items()
    }
    title = "FOAM, stale Shampoo and DR-Shampoo on the language model"
    curves = {name: runs for name, runs in published.runs.items() if "p = 2" in name}
    _report.write(args, "foam_lm", title, body, settings, results, draw(curves))


def grid_foam(period: int, threshold: float, most: float) -> Any:
    """FOAM at a point of the grid."""
    return foam(period, threshold, most, 1e-9, 2)


def search(go: Any, seed: int) -> tuple[str, tuple[int, int, float, float]]:
    """FOAM over the grid: the table, and the point to take with its number of steps."""
    rows, excess = [], {}
    for (steps, period), points in GRID.items():
        fixed = go(stale(period, 2, 1e-9), seed=seed, steps=steps)
        run = [f"{steps}", f"{period}"]
        number = f"{fixed.decompositions}"
        rows.append([*run, "stale", "", number, "100 %", f"{fixed.loss:.4f}", ""])
        for point in points:
            found = go(grid_foam(period, *point), seed=seed, steps=steps)
            share = found.decompositions / scheduled(steps, period)
            above = found.loss - fixed.loss
            if share <= MOST_SHARE:
                excess[steps, period, *point] = above
            numbers = [f"{found.decompositions}", f"{100 * share:.0f} %", f"{found.loss:.4f}"]
            rows.append([*run, *map("{:g}".format, point), *numbers, f"{above:+.4f}"])
            tqdm.write(" | ".join(rows[-1]), file=sys.stderr)
    titles = ["steps", "f", "threshold τ", "largest damping ε_max", "decompositions", "share"]
    titles += ["validation loss", "above stale"]
    return _report.table(titles, rows), min(excess, key=excess.__getitem__)


def with_asgo(go: Any, seed: int, seeds: tuple[int, ...]) -> tuple[str, dict[str, list[Run]]]:
    """ASGO with a root at every step and with FOAM's policy: what is to be said, and the runs."""
    tuning = {rate: go(asgo(), rate=rate, seed=seed) for rate in ASGO_RATES}
    rate = min(tuning, key=lambda rate: tuning[rate].loss)
    fixed = tuning[rate]
    rows, excess = (
        [["every step", "", f"{fixed.decompositions}", "100 %", f"{fixed.loss:.4f}", ""]],
        {},
    )
    for point in ASGO_GRID:
        run = go(asgo_foam(*point), rate=rate, seed=seed)
        share, above = run.decompositions / fixed.decompositions, run.loss - fixed.loss
        if share <= MOST_SHARE:
            excess[point] = above
        numbers = [f"{run.decompositions}", f"{100 * share:.1f} %", f"{run.loss:.4f}"]
        rows.append([*map("{:g}".format, point), *numbers, f"{above:+.4f}"])
        tqdm.write(" | ".join(rows[-1]), file=sys.stderr)
    best = min(excess, key=excess.__getitem__)
    runs = {
        "ASGO: every step": [go(asgo(), rate=rate, seed=s) for s in seeds],
        f"ASGO: FOAM, {best[0]:g}, {best[1]:g}": [
            go(asgo_foam(*best), rate=rate, seed=s) for s in seeds
        ],
    }
    every, foams = runs.values()
    share = [b.decompositions / a.decompositions for a, b in zip(every, foams, strict=True)]
    lines = [
        [name, f"{np.mean([r.decompositions for r in found]):.0f}", summary(found)]
        for name, found in runs.items()
    ]
    titles = ["threshold τ", "largest damping ε_max", "decompositions", "share", "validation loss"]
    return "\n\n".join(
        [
            "ASGO, ε0 = 1e-6, a root or a check at every step. Learning rate, tuned with a root at "
            "every step: "
            + ", ".join(f"{r:g} → {run.loss:.3f}" for r, run in tuning.items())
            + f"; taken: {rate:g}. Grid, seed {seed}:",
            _report.table([*titles, "above every step"], rows),
            "The best of it on the other seeds:",
            _report.table(["policy", "decompositions", "validation loss (range)"], lines),
            "FOAM's share of the decompositions and loss above that of a root at every step, seed "
            "by seed: "
            + ", ".join(
                f"{100 * x:.1f} %, {b.loss - a.loss:+.4f}"
                for x, a, b in zip(share, every, foams, strict=True)
            )
            + ".",
        ]
    ), runs


def draw(curves: dict[str, list[Run]]) -> Figure:
    """Damping and h over steps, for p = 2."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    foams = {name: runs for name, runs in curves.items() if "stale" not in name}
    for color, (name, runs) in zip(_report.COLORS, foams.items(), strict=False):
        steps = [line[0] for line in runs[0].history]
        for axis, column in ((left, 1), (right, 2)):
            if axis is left and "DR" in name:
                continue
            values = np.array([[line[column] for line in run.history] for run in runs])
            values[values == 0] = np.nan  # no check yet
            axis.plot(steps, values.mean(0), color=color, label=name)
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
    left.set(title="damping ε in use, geometric mean", xlabel="step", yscale="log")
    right.set(title="FOAM's h, DR's residual, median", xlabel="step", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    lines, names = right.get_legend_handles_labels()  # both panels have the same colors
    title = "over all factors; range of the seeds"
    figure.legend(lines, names, title=title, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    main()
