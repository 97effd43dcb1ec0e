"""The suites of the protocol (`docs/evidence.md`), declared before they ran.

A change here is a change of the protocol: write it there, with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._training import Task
from ._adapters import with_adapters
from ._classify import classify
from ._finetune import PUBLISHED, finetune
from ._language import language
from ._methods import ALL, METHODS, RMS, SIDES, STORAGES
from ._others import equation, factorization
from ._vision import vision

MAIN = tuple(method.name for method in ALL)
OPPONENT = (*MAIN, "stale_shampoo")  # of FOAM in its paper
LOW_RANK = ("galore", "fira", "alice", "apollo", "sumo")
SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 0
SCAN = (4.0, 1 / 4, 1 / 16)
SLOWER = (1 / 4, 1 / 16)


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
    scan: tuple[float, ...] = ()  # multiples of the starting rate that are tried first
    last: int = 0  # tuning runs at the end for the rate of what is not a matrix, AdamW's too
    slower: float = 1.0  # the learning rates at the start, over the declared ones
    after: str | None = None  # the suite at whose best points the tuning starts
    carried: bool = False  # whether learning rates start at AdamW's
    seeds: tuple[int, ...] = SEEDS
    ladder: str | None = None  # suites of one ladder differ in their steps alone
    unit: str = "nats per byte"

    @property
    def runs(self) -> int:
        """The runs of all methods, with all seeds."""
        return len(self.methods) * (self.budget + len(self.seeds))

    def task(self, method: str, task: Task) -> Task:
        """The suite's task as a method has it."""
        rank = METHODS[method].adapters if method in METHODS else 0  # a call has none
        return with_adapters(task, rank) if rank else task


def recipe(name: str, steps: int, **others: Any) -> Suite:
    """nanoGPT's recipe, or a model of another size, at a length."""
    sizes, text = others.pop("sizes", {}), others.pop("text", "prose")
    make = functools.partial(language, text, **sizes)
    return Suite(name=f"{name}-{steps}", make=make, steps=steps, **{"ladder": name, **others})


RATE = ("rate",)
SMALL = {"width": 96, "heads": 3}
LARGE = {"width": 256, "heads": 8, "depth": 6}
LONGER = ("adamw", "muon", "soap", "asgo", "racs", "alice")  # one of each family
SIZES = ("adamw", "muon", "soap", "racs")
LARGEST = ("adamw", "muon", "racs")
CALLED = (*SIZES, "swan", "shampoo", "alice")  # all whose calls pages recommend
BATCHED = ("adamw", "muon", "soap", "racs", "alice")
FORMED = ("adamw", "shampoo", *STORAGES, "swan", "swan_products")
WEIGHTS = ("adamw", "muon", "soap", *SIDES, "record")
ADAPTED = ("adamw", "lora_8", "lora_16", *LOW_RANK, "racs", "muon", "asgo", "dasgo")
FINETUNED = tuple(dict.fromkeys(ADAPTED + CALLED))


def retuned(name: str, steps: int, methods: tuple[str, ...], **others: Any) -> Suite:
    """A length or a size with the learning rate tuned again, from the best of `recipe-250`."""
    given = {"budget": 3, "only": RATE, "after": "recipe-250", "methods": methods}
    return recipe(name, steps, **{**given, **others})


def resized(name: str, steps: int, methods: tuple[str, ...], **others: Any) -> Suite:
    """The same for another size or text, where much smaller rates are tried first."""
    return retuned(name, steps, methods, budget=6, scan=SLOWER, **others)


def finetuned(
    name: str, make: Callable[[int], Task], steps: int, budget: int, **others: Any
) -> Suite:
    """Fine-tuning at rank 8, from a quarter of the declared learning rates."""
    given: dict[str, Any] = {"fixed": {"rank": 8}, "slower": 0.25, "only": RATE, "scan": SCAN}
    given |= {"methods": ADAPTED, "budget": budget, **others}
    return Suite(name=f"{name}-{steps}", make=make, steps=steps, **given)


def relative(
    name: str, make: Callable[[int], Task], rank: int, budget: int, last: int = 0
) -> Suite:
    """A problem without overfitting, 1000 steps."""
    fixed = {"decay": 0.0, "rank": rank}
    given: dict[str, Any] = {"unit": "log10 of the relative error", "scan": SCAN, "last": last}
    return Suite(name=f"{name}-1000", make=make, steps=1000, budget=budget, fixed=fixed, **given)


DECLARED = (
    recipe(
        "recipe", 250, budget=18, last=3, scan=SCAN, sizes={"evaluations": 10}, methods=OPPONENT
    ),
    relative("factorization", factorization, rank=4, budget=15),
    Suite(
        name="vision-2000",
        make=vision,
        steps=2000,
        budget=13,
        methods=OPPONENT,
        last=2,
        scan=SCAN,
        unit="nats per signal",
    ),
    finetuned("finetune", finetune, 250, budget=7, methods=FINETUNED),
    retuned("forms", 250, FORMED, ladder=None),
    retuned("carried", 250, ("adamw", *RMS), ladder=None, carried=True),
    recipe("published", 2000, budget=1, methods=("adamw",), fixed=PUBLISHED, ladder=None),
    finetuned("classify", classify, 250, budget=5, unit="nats per image"),
    resized("batch", 125, BATCHED, sizes={"batch": 48}),
    retuned("recipe", 500, LONGER),
    retuned("recipe", 1000, CALLED),
    retuned("recipe", 2000, ("adamw",)),
    *(resized("small", steps, SIZES, sizes=SMALL) for steps in (125, 250, 500)),
    *(resized("large", steps, LARGEST, sizes=LARGE) for steps in (40, 80, 160)),
    resized("large", 320, ("adamw",), sizes=LARGE),
    *(resized("code", n, CALLED if n == 250 else SIZES, text="code") for n in (125, 250, 500)),
    resized("code", 1000, ("adamw",), text="code"),
    retuned("weights", 250, WEIGHTS, budget=6),
    retuned("weights", 1000, WEIGHTS, budget=3, after="weights-250"),
    retuned("weights-large", 80, WEIGHTS, budget=3, after="weights-250", sizes=LARGE),
    relative("equation", equation, rank=16, budget=8, last=2),
)
SUITES = {suite.name: suite for suite in DECLARED}
