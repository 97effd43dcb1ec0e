"""The suites of the protocol (`docs/evidence.md`), declared before they ran.

A change here is a change of the protocol: write it there, with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import optax

from .._tasks import Task
from ._language import language
from ._methods import ADAM, METHODS

SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 0


@dataclasses.dataclass(frozen=True)
class Suite:
    """Methods on a task, tuned alike."""

    name: str
    make: Callable[[], Task]
    budget: int  # tuning runs of every method
    steps: int
    methods: tuple[str, ...] = tuple(METHODS)
    only: tuple[str, ...] | None = None  # coordinates that are varied; all of a method's if None
    after: str | None = None  # the suite at whose best points the tuning starts
    seeds: tuple[int, ...] = SEEDS
    ladder: str | None = None  # suites of one ladder differ in their steps alone
    unit: str = "nats per byte"

    @property
    def runs(self) -> int:
        """Of all methods, with all seeds."""
        return len(self.methods) * (self.budget + len(self.seeds))

    def schedule(self) -> optax.Schedule:
        """nanoGPT's: a warm-up of 5 % of the steps, then a cosine to a tenth."""
        warmup = max(1, self.steps // 20)
        return optax.warmup_cosine_decay_schedule(
            init_value=1 / warmup,
            peak_value=1.0,
            warmup_steps=warmup,
            decay_steps=self.steps,
            end_value=0.1,
        )


def recipe(steps: int, **others: object) -> Suite:
    """nanoGPT's recipe at a length."""
    make = functools.partial(language, "prose", steps)
    return Suite(f"recipe-{steps}", make, steps=steps, ladder="recipe", **others)  # pyright: ignore


SUITES = {
    suite.name: suite
    for suite in (
        recipe(250, budget=14),
        recipe(2000, budget=6, only=("rate", "decay"), after="recipe-250"),
        *(
            recipe(steps, budget=4, only=("rate",), after="recipe-250", methods=ADAM)
            for steps in (500, 1000, 4000)
        ),
    )
}
