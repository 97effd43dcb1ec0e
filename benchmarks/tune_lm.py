"""Tune every optimizer of `examples/train_lm.py` over one grid, then compare the best over seeds.

    python benchmarks/tune_lm.py      # about 10 minutes on two CPU cores; goes on where it stopped

Each optimizer runs at every learning rate of the same grid, with one seed and the example's own
step budget, schedule, model and weight decay. A best value at an end of the grid proves nothing:
the grid then grows by a point at that end, for all of them. At its best value each optimizer runs
with three other seeds. The time of a step is that of `python -m benchmarks train`, which has
the same model. Written to `benchmarks/results`: `tune_lm.json` with every run, `tune_lm.md`,
`tune_lm.png`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import _runs  # noqa: E402
import train_lm  # noqa: E402

GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
TUNING_SEED = 0
SEEDS = (1, 2, 3)


class Results:
    """The file tune_lm.json: a record for every finished run."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.data = json.loads(path.read_text()) if path.exists() else {}
        known = self.data.setdefault("settings", settings)
        if known != settings:
            sys.exit(f"{path} was made with other settings, {known}, not {settings}: move it away")
        self.data.setdefault("runs", [])

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)

    def find(self, optimizer: str, rate: float, seed: int) -> dict | None:
        wanted = {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
        return next((run for run in self.data["runs"] if wanted.items() <= run.items()), None)

    def add(self, config: train_lm.Config, result: _runs.Result) -> None:
        run = {
            "optimizer": config.optimizer,
            "learning_rate": config.learning_rate,
            "seed": config.seed,
            "validation_loss": result.best,
            "ms_per_step": round(result.ms_per_step, 2),
            "compile_seconds": round(result.compile_seconds, 2),
            "state_bytes": result.state_bytes,
            "history": result.history,
        }
        self.data["runs"].append(run)
        self.save()


def run_all(configs: list[train_lm.Config], corpus, results: Results, eval_every: int) -> None:
    """Run what is not yet in the results, optimizers in turn, so that drifts hit all alike."""
    missing = [c for c in configs if not results.find(c.optimizer, c.learning_rate, c.seed)]
    begin = time.perf_counter()
    for done, config in enumerate(missing):
        left = (time.perf_counter() - begin) / done * (len(missing) - done) / 60 if done else None
        remaining = f", {left:.0f} minutes left" if left is not None else ""
        rate = f"learning rate {config.learning_rate:g}, seed {config.seed}"
        print(f"[{done + 1}/{len(missing)}{remaining}] {config.optimizer}: {rate}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            result = train_lm.train(config, corpus, Path(directory), eval_every, config.steps)
        results.add(config, result)


def tune(base: train_lm.Config, corpus, results: Results) -> tuple[list[float], dict[str, float]]:
    """The grid, grown until each optimizer's best value is interior to it; and the best values."""
    grid = list(GRID)
    while True:
        configs = [
            dataclasses.replace(base, optimizer=name, learning_rate=rate, seed=TUNING_SEED)
            for rate in grid
            for name in train_lm.OPTIMIZERS
        ]
        run_all(configs, corpus, results, eval_every=base.steps)
        best = {name: best_rate(results, name, grid) for name in train_lm.OPTIMIZERS}
        if grid[0] in best.values():
            grid.insert(0, grid[0] / 2)
        elif grid[-1] in best.values():
            grid.append(grid[-1] * 2)
        else:
            return grid, best
        print(f"A best value is at an end of the grid, which becomes {grid}.")


def best_rate(results: Results, name: str, grid: list[float]) -> float:
    return min(grid, key=lambda rate: loss_at(results, name, rate))


def loss_at(results: Results, name: str, rate: float) -> float:
    run = results.find(name, rate, TUNING_SEED)
    assert run is not None
    return run["validation_loss"]


def step_times(base: train_lm.Config, best: dict[str, float], results: Results) -> dict[str, float]:
    """Milliseconds of a step: those of `python -m benchmarks train`, if its model is the same.

    There the methods take turns, step by step; here other work on the machine falls on one of them.
    """
    record = json.loads((ROOT / "benchmarks" / "results" / "train.json").read_text())
    sizes = ("batch", "context", "width", "depth")
    if any(record["settings"]["lm"][x] != getattr(base, x) for x in sizes):
        own = {name: seed_runs(results, name, rate) for name, rate in best.items()}
        return {name: float(np.mean([r["ms_per_step"] for r in own[name]])) for name in best}
    (table,) = (x for x in record["tables"] if x["title"] == "A small language model")
    rows = {row["method"].removeprefix("optax."): row for row in table["rows"]}
    return {name: rows["adamw"]["ms"] * rows[name]["ms_over_adamw"] for name in best}


def tables(results: Results, grid: list[float], best: dict[str, float]) -> str:
    settings, machine = results.data["settings"], results.data["machine"]
    lines = [
        "# Learning rates of `examples/train_lm.py`, and a comparison at the best",
        "",
        f"`{machine['command']}` on {machine['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ". Setting: "
        + ", ".join(f"{name} {value}" for name, value in settings.items())
        + ".",
        "",
        f"Final validation loss (nats per character) at each learning rate, seed {TUNING_SEED}; "
        "the best is bold:",
        "",
        "| optimizer | " + " | ".join(f"{rate:g}" for rate in grid) + " |",
        "|---|" + "---:|" * len(grid),
    ]
    for name, chosen in best.items():
        losses = {rate: f"{loss_at(results, name, rate):.3f}" for rate in grid}
        losses[chosen] = f"**{losses[chosen]}**"
        lines.append(f"| {name} | " + " | ".join(losses.values()) + " |")
    lines += [
        "",
        f"At the best learning rate, seeds {', '.join(map(str, SEEDS))}; best validation loss. "
        "*ms/step*: of the same model in [train](train.md).",
        "",
        "| optimizer | learning rate | mean | min | max | ms/step | state MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    losses = {}
    for name, rate in best.items():
        runs = seed_runs(results, name, rate)
        losses[name] = [run["validation_loss"] for run in runs]
        speed = results.data["step_ms"][name]
        lines.append(
            f"| {name} | {rate:g} | {np.mean(losses[name]):.4f} | {min(losses[name]):.4f} "
            f"| {max(losses[name]):.4f} | {speed:.1f} "
            f"| {runs[0]['state_bytes'] / 1e6:.2f} |"
        )
    lines.append("")
    for name in list(best)[1:]:
        gap = np.mean(losses["adamw"]) - np.mean(losses[name])
        apart = max(losses[name]) < min(losses["adamw"]) or min(losses[name]) > max(losses["adamw"])
        lines.append(
            f"- {name} ends {abs(gap):.3f} {'below' if gap > 0 else 'above'} AdamW in the mean; "
            f"the ranges of the {len(SEEDS)} seeds {'do not overlap' if apart else 'overlap'}."
        )
    return "\n".join(lines) + "\n"


def seed_runs(results: Results, name: str, rate: float) -> list[dict]:
    return [run for seed in SEEDS if (run := results.find(name, rate, seed))]


def plot(results: Results, best: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, rate in best.items():
        histories = [run["history"] for run in seed_runs(results, name, rate)]
        steps, losses = (
            np.array([[line[key] for line in history] for history in histories])
            for key in ("step", "validation_loss")
        )
        seconds = steps[0] * results.data["step_ms"][name] / 1000
        for axis, x in ((left, steps[0]), (right, seconds)):
            color = _runs.COLORS[name]
            axis.plot(x, losses.mean(0), marker=".", color=color, label=f"{name}, {rate:g}")
            axis.fill_between(x, losses.min(0), losses.max(0), color=color, alpha=0.25, linewidth=0)
            axis.grid(alpha=0.3)
    left.set(xlabel="step", ylabel="validation loss (nats per character)")
    right.set(xlabel="seconds of training")
    right.legend(title="learning rate tuned; range of three seeds", frameon=False)
    figure.savefig(path, dpi=150)


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(": ")[1] for x in lines if x.startswith("model name")), cpu)
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{os.cpu_count()} cores of {cpu}, {jax.default_backend()} backend",
        "versions": {"python": platform.python_version(), **versions},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the optimizers of examples/train_lm.py.")
    add, default = parser.add_argument, train_lm.Config
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="(%(default)s)")
    add("--steps", type=_runs.whole, default=default.steps, help="(%(default)s)")
    add("--width", type=_runs.whole, default=default.width, help="(%(default)s)")
    add("--depth", type=_runs.whole, default=default.depth, help="(%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    corpus = train_lm.read_corpus(None, default.context)
    sizes = {"steps": args.steps, "width": args.width, "depth": args.depth}
    base = train_lm.Config("adamw", 1.0, corpus.digest, **sizes)
    chosen_below = ("optimizer", "learning_rate", "seed")
    settings = {k: v for k, v in dataclasses.asdict(base).items() if k not in chosen_below}
    results = Results(args.out / "tune_lm.json", settings)
    results.data["machine"] = machine()

    print(f"Grid: {', '.join(f'{rate:g}' for rate in GRID)}, for {', '.join(train_lm.OPTIMIZERS)}.")
    grid, best = tune(base, corpus, results)
    seeds = [
        dataclasses.replace(base, optimizer=name, learning_rate=rate, seed=seed)
        for seed in SEEDS
        for name, rate in best.items()
    ]
    run_all(seeds, corpus, results, eval_every=20)

    results.data |= {"grid": grid, "best": best, "step_ms": step_times(base, best, results)}
    results.save()
    text = tables(results, grid, best)
    (args.out / "tune_lm.md").write_text(text)
    plot(results, best, args.out / "tune_lm.png")
    print(f"\n{text}\nFor examples/train_lm.py: LEARNING_RATES = {best}")


if __name__ == "__main__":
    main()
