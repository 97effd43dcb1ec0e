"""The suites of the protocol (`docs/evidence.md`), declared before they ran.

A change here is a change of the protocol: write it there, with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

from .._tasks import Task
from ._adapters import with_adapters
from ._finetune import PUBLISHED, finetune
from ._language import language
from ._methods import ALL, METHODS, schedule_of
from ._others import equation, factorization
from ._vision import vision

MAIN = tuple(method.name for method in ALL)
LOW_RANK = ("galore", "fira", "alice", "apollo", "sumo")
SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Methods on a task, tuned alike."""

    name: str
    make: Callable[[int], Task]  # from the steps
    steps: int
    budget: int  # tuning runs of every method
    methods: tuple[str, ...] = MAIN
    only: tuple[str, ...] | None = None  # coordinates that are varied; all of a method's if None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # these are not varied
    slower: float = 1.0  # the learning rates at the start, over the declared ones
    after: str | None = None  # the suite at whose best points the tuning starts
    seeds: tuple[int, ...] = SEEDS
    ladder: str | None = None  # suites of one ladder differ in their steps alone
    unit: str = "nats per byte"

    @property
    def runs(self) -> int:
        """Of all methods, with all seeds."""
        return len(self.methods) * (self.budget + len(self.seeds))

    def task(self, method: str, task: Task) -> Task:
        """The suite's task as a method has it."""
        rank = METHODS[method].adapters
        return with_adapters(task, rank) if rank else task

    def schedule(self) -> optax.Schedule:
        """The share of the peak learning rate at a step."""
        return schedule_of(self.steps)


def recipe(name: str, steps: int, **others: Any) -> Suite:
    """nanoGPT's recipe, or a model of another size, at a length."""
    sizes = others.pop("sizes", {})
    make = functools.partial(language, "prose", **sizes)
    return Suite(name=f"{name}-{steps}", make=make, steps=steps, ladder=name, **others)


RATE = ("rate",)
SMALL = {"width": 96, "heads": 3}
LARGE = {"width": 256, "heads": 8, "depth": 6}

DECLARED = (
    recipe("recipe", 250, budget=14),
    recipe("recipe", 500, budget=4, only=RATE, after="recipe-250", methods=("adamw",)),
    Suite(
        name="finetune-250",
        make=finetune,
        steps=250,
        budget=12,
        methods=("adamw", "lora_8", "lora_16", *LOW_RANK, "racs", "muon", "asgo", "dasgo"),
        fixed={"rank": 8},
        slower=0.25,
    ),
    Suite(
        name="factorization-1000",
        make=factorization,
        steps=1000,
        budget=14,
        fixed={"decay": 0.0, "rank": 4},
        unit="log10 of the relative error",
    ),
    Suite(
        name="equation-1000",
        make=equation,
        steps=1000,
        budget=14,
        fixed={"decay": 0.0, "rank": 16},
        unit="log10 of the relative error",
    ),
    Suite(
        name="vision-2000",
        make=vision,
        steps=2000,
        budget=14,
        unit="nats per signal",
    ),
    recipe("recipe", 2000, budget=6, only=("rate", "decay"), after="recipe-250"),
    recipe("recipe", 1000, budget=4, only=RATE, after="recipe-250", methods=("adamw",)),
    recipe("recipe", 4000, budget=4, only=RATE, after="recipe-250", methods=("adamw",)),
    Suite(
        name="published-2000",
        make=functools.partial(language, "prose"),
        steps=2000,
        budget=1,
        methods=("adamw",),
        fixed=PUBLISHED,
    ),
    Suite(
        name="storage-250",
        make=functools.partial(language, "prose"),
        steps=250,
        budget=4,
        methods=("adamw", "shampoo", "shampoo_vq", "shampoo_cq"),
        only=RATE,
        after="recipe-250",
    ),
    *(
        recipe(name, steps, budget=4, only=RATE, after="recipe-250", sizes=sizes)
        for name, sizes in {"small": SMALL, "large": LARGE}.items()
        for steps in (250, 1000)
    ),
)
SUITES = {suite.name: suite for suite in DECLARED}
