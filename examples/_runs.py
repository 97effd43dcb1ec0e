"""The output of `train_lm.py`: checkpoints, metrics, curves, the final table."""

import argparse
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

# On a CPU the threads of LAPACK (OpenBLAS) and of XLA compete for the cores: with one of each per
# core, a step with decompositions took twice as long. Set this before JAX loads them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure

COLORS = {"adamw": "dimgray", "muon": "crimson", "soap": "darkorange", "racs": "steelblue"}


class Result(NamedTuple):
    """One run, complete or stopped."""

    optimizer: str
    learning_rate: float
    history: list[dict[str, float]]  # the lines of metrics.jsonl
    steps: int
    seconds: float  # of training: without compilation, evaluations and checkpoints
    compile_seconds: float
    state_bytes: int

    @property
    def best(self) -> float:
        losses = [line["validation_loss"] for line in self.history]
        return min(filter(math.isfinite, losses), default=math.inf)

    @property
    def ms_per_step(self) -> float:
        return 1000 * self.seconds / self.steps


class Checkpoints:
    """The last two complete states of a run.

    Orbax moves a checkpoint into its place when it is finished, so no reader sees half of one.
    """

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.path = (directory / "checkpoints").absolute()
        self.manager = ocp.CheckpointManager(self.path, options=options)

    def save(self, step: int, state: Any, about: dict) -> None:
        """Writes the state, and `about`, which is read before the state is restored."""
        items = {"state": ocp.args.StandardSave(state), "about": ocp.args.JsonSave(about)}
        self.manager.save(step, args=ocp.args.Composite(**items))

    def about(self) -> dict | None:
        if self.manager.latest_step() is None:
            return None
        return self._read(about=ocp.args.JsonRestore())

    def restore(self, like: Any) -> Any:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._read(state=ocp.args.StandardRestore(like))

    def _read(self, **item: Any) -> Any:
        try:
            (value,) = self.manager.restore(None, args=ocp.args.Composite(**item)).values()
        except Exception as error:  # Orbax raises various ones for a truncated or missing file
            last = self.path / str(self.manager.latest_step())
            reason = str(error).splitlines()[0][:200]
            sys.exit(
                f"error: the checkpoint {str(last)!r} cannot be read ({reason}). Delete it "
                "to continue from the one before it, if there is one."
            )
        return value


def checkpoint_in(directory: Path) -> dict | None:
    """The `about` of a run's last complete checkpoint; None before the first checkpoint."""
    return Checkpoints(directory).about() if (directory / "checkpoints").is_dir() else None


class Metrics:
    """The file metrics.jsonl. Drops the lines after `step`, which the run computes again."""

    def __init__(self, path: Path, step: int):
        self.path = path
        text = path.read_text() if step and path.exists() else ""
        complete = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
        self.lines: list[dict[str, float]] = [line for line in complete if line["step"] <= step]
        path.with_suffix(".new").write_text("".join(json.dumps(x) + "\n" for x in self.lines))
        os.replace(path.with_suffix(".new"), path)

    def append(self, **line: float) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Interrupt:
    """True after a first Ctrl-C, so that the training loop can finish its step.

    A step cannot be interrupted, because its input, the last state, has been donated. A second
    Ctrl-C acts as usual.
    """

    def __init__(self):
        self.pressed = False
        signal.signal(signal.SIGINT, self)

    def __call__(self, *_):
        self.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self) -> bool:
        return self.pressed


def plot(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, key in ((left, "step"), (right, "seconds")):
        for result in results:
            x, y = ([line[k] for line in result.history] for k in (key, "validation_loss"))
            label = f"{result.optimizer}, learning rate {result.learning_rate:g}"
            axis.plot(x, y, marker=".", color=COLORS[result.optimizer], label=label)
        axis.grid(alpha=0.3)
    left.set(xlabel="step", ylabel="validation loss (nats per character)")
    right.set(xlabel="seconds of training")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


def table(results: list[Result]) -> str:
    titles = ("optimizer", "best validation loss", "ms/step", "compile s", "optimizer state MB")
    rows = [
        (
            run.optimizer,
            f"{run.best:.4f}",
            f"{run.ms_per_step:.1f}",
            f"{run.compile_seconds:.1f}",
            f"{run.state_bytes / 1e6:.2f}",
        )
        for run in results
    ]
    return "\n".join("{:<10}{:>22}{:>10}{:>11}{:>20}".format(*row) for row in (titles, *rows))


def whole(text: str) -> int:
    """A positive integer as an argument."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, not {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A positive number as an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value
