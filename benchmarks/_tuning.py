"""Many methods on one task: a learning rate for each from the same grid, then other seeds at it.

All methods run at every learning rate of one grid, with one seed. A best value at an end of the
grid proves nothing: the grid then grows by a factor of 2 at that end, for all of them. So every
method has the same number of runs to be tuned with, and a worse neighbor on either side of its
best. At its best each then runs with three other seeds. In every method all other parameters go to
AdamW at AdamW's own best learning rate, so that each method has one number to tune. Runs of one
seed start from the same parameters and see the same batches. On a CPU all methods train side by
side on a seed, a few steps each in turn, so that other load on the machine hits all of them alike;
on an accelerator, which has less memory and no other load, they train one after the other.

Finished runs are kept under runs/tuned, by all that decides their numbers: the task, the method,
the machine, the versions, and the sources of the library, of the tasks and of the training.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import curvax

from . import _optimizers, _record, _tasks, _training
from ._optimizers import ADAMW
from ._tasks import WEIGHT_DECAY, Task
from ._training import Method, Program, Run

GRID = (8e-3, 1.6e-2, 3.2e-2)
MOST_RATES = 14  # 2¹³ between the ends: a best value there is said to be at an end
SEEDS = 3
RUNS = Path("runs", "tuned")


def best_of(tuning: Mapping[float, float]) -> float:
    """The learning rate with the smallest loss."""
    return min(tuning, key=tuning.__getitem__)


def grown(grid: Sequence[float], bests: Iterable[float]) -> tuple[float, ...]:
    """The grid, with another point at each end that is the best of any method."""
    bests = set(bests)
    if len(grid) >= MOST_RATES:
        return tuple(grid)
    low = [grid[0] / 2] if grid[0] in bests else []
    high = [2 * grid[-1]] if grid[-1] in bests else []
    return (*low, *grid, *high)


def sources() -> list[Path]:
    """The sources that decide a run: the library, the tasks, the training."""
    package = Path(curvax.__file__).parent
    folders = (package / "optimizers", package / "transforms")
    own = [Path(str(module.__file__)) for module in (_tasks, _training, _optimizers)]
    library = sorted(package.glob("*.py"))
    library += [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [*library, *own, *_tasks.SOURCES]


@functools.cache
def digest() -> str:
    """A digest of these sources, the versions of packages, and the machine."""
    packages = {name: importlib.metadata.version(name) for name in _record.PACKAGES}
    hashed = hashlib.sha256(json.dumps([packages, _record.machine()["hardware"]]).encode())
    for path in sources():
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


class Found(NamedTuple):
    """A method at its best learning rate."""

    tuning: dict[float, float]  # final validation loss by learning rate
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
    def seconds(self) -> np.ndarray:
        """From the start to each evaluation: of every stretch the median of the seeds."""
        return np.cumsum(np.median([run.seconds for run in self.runs], axis=0))

    def seconds_at(self, step: float) -> float:
        """Seconds to a step, on a straight line from one evaluation to the next."""
        if not math.isfinite(step):
            return math.inf
        return float(np.interp(step, [0, *self.runs[0].steps], [0.0, *self.seconds]))

    @property
    def compile_seconds(self) -> float:
        """The median of the runs, which are of one program where nothing came from the cache."""
        return float(np.median([run.compile_seconds for run in self.runs]))


def finite(value: float) -> float | None:
    """The value, or None, which JSON has a word for."""
    return float(value) if math.isfinite(value) else None


class Study:
    """Trains methods on a task, or looks into the cache."""

    def __init__(
        self, task: Task, methods: Iterable[Method], seed: int, grid: Sequence[float] = GRID
    ):
        """Takes the methods besides AdamW, the tuning's seed and the first grid."""
        self.task, self.seed, self.grid = task, seed, tuple(grid)
        self.seeds = tuple(range(seed + 1, seed + 1 + SEEDS))
        self.methods = {method.said: method for method in (ADAMW, *methods)}
        self.programs = {
            said: Program(functools.partial(method.optimizer, task), task)
            for said, method in self.methods.items()
        }
        self.runs: dict[Path, Run] = {}  # by where they are kept
        self.trained = 0  # the others came from the cache
        self.tunings: dict[str, dict[float, float]] = {}  # by method and learning rate
        self.bar = tqdm(desc=task.name, unit="run", file=sys.stderr, dynamic_ncols=True)

    def run(self) -> Study:
        """Tunes all methods, then runs their seeds."""
        larger = self.grid
        while larger != self.grid or not self.tunings:
            self.grid = larger
            self.bar.total = len(self.methods) * (len(self.grid) + SEEDS)
            self.tune([ADAMW.said])
            larger = grown(self.grid, [self.adam_rate])
            if larger == self.grid:
                self.tune(self.methods)
                larger = grown(self.grid, map(best_of, self.tunings.values()))
        together = jax.default_backend() == "cpu"
        bests = {said: best_of(tuning) for said, tuning in self.tunings.items()}
        for seed in self.seeds:
            for group in [bests] if together else [{said: bests[said]} for said in bests]:
                self.train(group, seed)
        self.bar.close()
        return self

    @property
    def adam_rate(self) -> float:
        """AdamW's best learning rate."""
        return best_of(self.tunings[ADAMW.said])

    def tune(self, methods: Iterable[str]) -> None:
        """Methods in turn at every learning rate of the grid."""
        for rate in self.grid:
            for said in methods:
                (run,) = self.train({said: rate}, self.seed)
                self.tunings.setdefault(said, {})[rate] = run.loss
        for said in methods:
            self.tunings[said] = {rate: self.tunings[said][rate] for rate in self.grid}

    def find(self, method: Method) -> Found:
        """A method at its best learning rate, on all seeds."""
        tuning = self.tunings[method.said]
        runs = [self.train({method.said: best_of(tuning)}, seed)[0] for seed in self.seeds]
        values = {"rate": best_of(tuning), "adam_rate": self.adam_rate}
        return Found(tuning, runs, self.programs[method.said].state_bytes(values))

    def find_all(self, methods: Mapping[str, Method]) -> dict[str, Found]:
        """By name."""
        return {name: self.find(method) for name, method in methods.items()}

    def train(self, rates: Mapping[str, float], seed: int) -> list[Run]:
        """Runs of methods at these learning rates, in turns, but for those in the cache."""
        places, missing = [], {}
        for said, rate in rates.items():
            rest = rate if said == ADAMW.said else self.adam_rate
            place = self.place(said, rate, rest, seed)
            if place not in self.runs and place.exists():
                self.runs[place] = Run(**json.loads(place.read_text()))
                self.bar.update()
            elif place not in self.runs:
                train = self.programs[said].train
                values = {"rate": rate, "adam_rate": rest}
                missing[place] = train(values, seed, seed == self.seed)
            places.append(place)
        if missing:
            self.bar.set_postfix_str(f"{', '.join(map(name_of, rates))[:40]}, seed {seed}")
            self.take_turns(missing)
        return [self.runs[place] for place in places]

    def take_turns(self, runs: Mapping[Path, Iterator[Run]]) -> None:
        """A stretch of each, until all have ended."""
        stretches = -(-self.task.steps // self.task.eval_every)
        turns = zip(*runs.values(), strict=True)
        *_, found = tqdm(turns, total=stretches, leave=False, position=1, file=sys.stderr)
        for place, run in zip(runs, found, strict=True):
            keep(place, run)
            self.runs[place] = run
        self.trained += len(runs)
        self.bar.update(len(runs))

    def place(self, said: str, rate: float, rest: float, seed: int) -> Path:
        """Where a run is kept."""
        config = [self.task.name, dict(self.task.sizes), said, rate, rest, seed, seed == self.seed]
        config += [digest()]
        return RUNS / f"{hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]}.json"

    def settings(self) -> dict[str, Any]:
        """For the record."""
        return {
            **self.task.sizes,
            "weight_decay": WEIGHT_DECAY,
            "tuning_seed": self.seed,
            "seeds": self.seeds,
            "grid": self.grid,
            "adam_learning_rate": self.adam_rate,
            "eval_every": self.task.eval_every,
            "sources": digest(),
            "cached_runs": len(self.runs) - self.trained,
            "runs": len(self.runs),
        }

    def head(self) -> str:
        """The first sentences of a page."""
        size = sum(x.size for x in jax.tree.leaves(self.programs[ADAMW.said].like))
        low, high = self.grid[0], self.grid[-1]
        return (
            f"{self.task.about}; {size:,} parameters, weight decay {WEIGHT_DECAY:g}, the schedule "
            f"of `examples/train_lm.py`. Every method was tuned on seed {self.seed} at the same "
            f"{len(self.grid)} learning rates, {low:g} to {high:g} by factors of 2, and ran with "
            f"seeds {', '.join(map(str, self.seeds))} at its best. All other parameters go to "
            f"AdamW at AdamW's own best rate, {self.adam_rate:g}."
        )


def name_of(said: str) -> str:
    """The function that is called."""
    return said.partition("(")[0]


def keep(path: Path, run: Run) -> None:
    """Writes a run, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(run._asdict()))
    unfinished.rename(path)
