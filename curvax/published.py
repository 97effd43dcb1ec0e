"""The settings that papers and benchmarks publish: `RUNS`, and the optimizer of each.

`RUNS["alice/llama-130M"].optimizer()` is Alice as Gong et al. trained LLaMA 130M with it. Each
`Run` has the paper's numbers, their places in the paper, and the values that the paper leaves open
(docs/published.md). They are read from `published.toml` when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import jax.numpy as jnp
import optax

from ._published_calls import MAKERS
from .transforms._validate import Integer, Number

__all__ = ["RUNS", "Run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A row of a paper's tables.

    Args:
      source: the paper and where in it the numbers stand.
      make: the name of the function from a learning rate, or a schedule, and `numbers` to the
        optimizer.
      numbers: its arguments, as published.
      learning_rate: the peak; `None` if the paper has none.
      steps: of the run; `None` if the paper counts epochs.
      schedule: from the peak and the steps to the schedule.
      task: batch and length of the run, in words.
      open: values that the paper does not give, and our choices.
      whole: whether the function gets `schedule` and `steps` too, for other rates and for marks.
    """

    source: str
    make: str
    numbers: Mapping[str, Any]
    learning_rate: float | None = None
    schedule: Schedule
    task: str
    steps: int | None = None
    open: str = ""
    whole: bool = False

    def optimizer(
        self, steps: int | None = None, learning_rate: float | None = None, **changes: Any
    ) -> optax.GradientTransformation:
        """The optimizer of the run, with the paper's schedule.

        Args:
          steps: of the run; `None` is the paper's number.
          learning_rate: the peak; `None` is the paper's.
          changes: arguments in place of the published ones, or beside them.

        Raises:
          ValueError: if the paper has no `steps` or no `learning_rate`, and none is given, or if
            one is not allowed: a run has more steps than its schedule has steps without updates.

        Example:
          >>> import curvax
          >>> run = curvax.published.RUNS["alice/llama-130M"]
          >>> run.learning_rate, run.steps, run.numbers["rank"]
          (0.02, 20000, 256)
          >>> optimizer = run.optimizer()
          >>> shorter = run.optimizer(steps=1000, rank=64)
        """
        values = {"steps": steps, "learning_rate": learning_rate}
        values = {name: getattr(self, name) if x is None else x for name, x in values.items()}
        for name, x in values.items():
            if x is None:
                raise ValueError(f"{name} must be given: {self.source} has none. {self.open}")
        Integer(self.schedule.idle + 1).check("steps", values["steps"])
        Number("[0, inf)").check("learning_rate", values["learning_rate"])
        rate = self.schedule(values["learning_rate"], values["steps"])
        numbers = {**self.numbers, **changes}
        if self.whole:
            numbers = {"schedule": self.schedule, "steps": values["steps"], **numbers}
        return MAKERS[self.make](rate, **numbers)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A linear warm-up, then a cosine; both as shares, of the steps and of the peak.

    With `cooldown`, constant in the place of the cosine, and in this share of the steps at the end
    a power of what is left of it.
    """

    warmup: float = 0.0
    final: float = 0.0
    first: float = 0.0
    idle: int = 0  # first steps with learning rate 0
    cooldown: float = 0.0
    power: float = 1.0

    def __call__(self, peak: float, steps: int) -> optax.Schedule:
        """The schedule of a run."""
        if self.cooldown:
            left = lambda step: jnp.clip((1 - step / steps) / self.cooldown, 0.0, 1.0)  # noqa: E731
            share = lambda step: self.final + (1 - self.final) * left(step) ** self.power  # noqa: E731
            return lambda step: peak * share(step)
        warmup = round(self.warmup * (steps - self.idle))
        cosine = optax.warmup_cosine_decay_schedule(
            self.first * peak, peak, warmup, steps - self.idle, end_value=self.final * peak
        )
        zero = optax.constant_schedule(0.0)
        return optax.join_schedules([zero, cosine], [self.idle]) if self.idle else cosine

    def __str__(self) -> str:
        first = f"warm-up {100 * self.warmup:.3g} %, " if self.warmup else ""
        idle = f"{self.idle} steps without updates, " if self.idle else ""
        last = f"{self.final:.3g} of the peak" if self.final else "0"
        if self.cooldown:
            form = "linear" if self.power == 1 else f"power {self.power:g}"
            return f"in the last {100 * self.cooldown:.3g} % {form} to {last}"
        return f"{idle}{first}cosine to {last}"


class _Runs(Mapping[str, Run]):
    """The runs by name, read when the first one is asked for."""

    @functools.cached_property
    def _read(self) -> dict[str, Run]:
        import tomllib  # takes as long as the rest of this module

        text = resources.files(__package__).joinpath("published.toml").read_text(encoding="utf-8")
        return dict(itertools.chain.from_iterable(map(_runs_of, tomllib.loads(text)["tables"])))

    def __getitem__(self, name: str) -> Run:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


RUNS: Mapping[str, Run] = _Runs()
"""The runs of the papers, of Marin's benchmark and of the speed records, by method and task."""


def _runs_of(table: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """The runs of a table, with their names: each of its methods on each of its models."""
    methods, models = (table.pop(part, [{}]) for part in ("methods", "models"))
    for method, model in itertools.product(methods, models):
        values = {**table, **method, **model}
        texts = [part["open"] for part in (method, model, table) if "open" in part]
        run, on = values.pop("run"), values.pop("on")
        fields: dict[str, Any] = {"make": run, **_taken(values, Run), "open": " ".join(texts)}
        schedule = Schedule(**_taken(values, Schedule))
        yield f"{run}/{on}", Run(**fields, schedule=schedule, numbers=values)


def _taken(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The fields of a dataclass, which `values` no longer has then."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in values]
    return {name: values.pop(name) for name in names}
