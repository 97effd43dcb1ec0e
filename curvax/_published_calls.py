"""A published run, and optimizers from the plain numbers of the papers' tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

from . import grafts, subspaces
from .optimizers import alice, asgo, assemble, scale_by_shampoo, shampoo, soap
from .transforms.matrices._matrix_rule import MatrixRule
from .transforms.refresh._policy import every
from .transforms.storage._cholesky import cholesky
from .transforms.storage._quantized import quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A row of a paper's tables.

    Args:
      source: the paper and where in it the numbers stand.
      make: from a learning rate, or a schedule, and `numbers` to the optimizer.
      numbers: its arguments, as published.
      learning_rate: the peak; `None` if the paper has none.
      steps: of the run; `None` if the paper counts epochs.
      schedule: from the peak and the steps to the schedule.
      task: batch and length of the run, in words.
      open: values that the paper does not give, and our choices.
    """

    source: str
    make: Callable[..., optax.GradientTransformation]
    numbers: Mapping[str, Any]
    learning_rate: float | None
    schedule: Schedule
    task: str
    steps: int | None = None
    open: str = ""

    def optimizer(
        self, steps: int | None = None, learning_rate: float | None = None, **changes: Any
    ) -> optax.GradientTransformation:
        """The optimizer of the run, with the paper's schedule.

        Args:
          steps: of the run; `None` is the paper's number.
          learning_rate: the peak; `None` is the paper's.
          changes: arguments in place of the published ones, or beside them.

        Raises:
          ValueError: if the paper has no `steps` or no `learning_rate`, and none is given.

        Example:
          >>> import curvax
          >>> run = curvax.published.RUNS["alice/llama-130M"]
          >>> run.learning_rate, run.steps, run.numbers["rank"]
          (0.02, 20000, 256)
          >>> optimizer = run.optimizer()
          >>> shorter = run.optimizer(steps=1000, rank=64)
        """
        given = {"steps": steps, "learning_rate": learning_rate}
        given = {name: getattr(self, name) if x is None else x for name, x in given.items()}
        for name, x in given.items():
            if x is None:
                raise ValueError(f"{name} must be given: {self.source} has none. {self.open}")
        rate = self.schedule(given["learning_rate"], given["steps"])
        return self.make(rate, **{**self.numbers, **changes})


# Schedules.


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A linear warm-up, then a cosine; both as shares, of the steps and of the peak."""

    warmup: float
    final: float
    start: float = 0.0
    idle: int = 0  # first steps with learning rate 0

    def __call__(self, peak: float, steps: int) -> optax.Schedule:
        """The schedule of a run."""
        warmup = round(self.warmup * (steps - self.idle))
        cosine = optax.warmup_cosine_decay_schedule(
            self.start * peak, peak, warmup, steps - self.idle, end_value=self.final * peak
        )
        zero = optax.constant_schedule(0.0)
        return optax.join_schedules([zero, cosine], [self.idle]) if self.idle else cosine

    def __str__(self) -> str:
        first = f"warm-up {100 * self.warmup:.3g} %, " if self.warmup else ""
        idle = f"{self.idle} steps without updates, " if self.idle else ""
        last = f"{self.final:.3g} of the peak" if self.final else "0"
        return f"{idle}{first}cosine to {last}"


# The optimizers, from plain numbers.

EXACT: dict[str, Any] = {"method": "eigh"}
"""As the papers have it, on all platforms."""


def exact_asgo(rate: Any, **numbers: Any) -> optax.GradientTransformation:
    """An et al.: roots by decompositions."""
    return asgo(rate, **{**EXACT, **numbers})


def adamw(rate: Any, **numbers: Any) -> optax.GradientTransformation:
    """Without weight decay, if the paper has no number for it."""
    return optax.adamw(rate, **{"weight_decay": 0.0, **numbers})


def sgd(rate: Any, *, momentum: float, weight_decay: float) -> optax.GradientTransformation:
    """With weight decay inside the momentum, as in torch."""
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(decay, optax.sgd(rate, momentum=momentum))


def alice_of(
    rate: Any, *, leading: int, compensation_scale: float, **numbers: Any
) -> optax.GradientTransformation:
    """Gong et al.: the numbers l and α_c of two values."""
    values = {
        "switching": subspaces.complement(leading),
        "compensation": subspaces.optimal(weight=compensation_scale),
    }
    return alice(rate, **{**values, **numbers})


def shampoo_on(
    rate: Any, *, base: Callable[..., Any], storage: str, **numbers: Any
) -> optax.GradientTransformation:
    """Li et al.: a base optimizer, which all other parameters have too."""
    storages = {
        "": None,
        "vq": quantized(),
        "cq": cholesky(damping_mode="absolute"),
        "cq-ef": cholesky(error_feedback=0.95, damping_mode="absolute"),
    }
    stored = storages.get(storage, storage)
    return shampoo(rate, base=base, **{"storage": stored, "others": base(rate), **numbers})


def warmed_shampoo(
    rate: Any, *, warmup_steps: int, refresh: int, b1: float, b2: float, root: int, **changes: Any
) -> optax.GradientTransformation:
    """An et al.: the first steps only collect statistics; their learning rate is 0."""
    direction = scale_by_shampoo(
        b1=b1,
        b2=b2,
        root=root,
        graft=None,
        statistics_every=1,
        refresh=every(refresh, offset=1),
        warmup_steps=warmup_steps,
        **EXACT,
    )
    return assemble(direction, rate, **changes)


def _with_adamw(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """Nam and Ahn: a method with the AdamW of all other parameters."""

    def make(
        rate: Any, *, b1: float, b2: float, eps: float, weight_decay: float, **numbers: Any
    ) -> optax.GradientTransformation:
        others = optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay)
        rest = {"others": others, "weight_decay": weight_decay, **numbers}
        return method(rate, b1=b1, b2=b2, eps=eps, **rest)

    return make


PRINTED = {"root": 2, "damping_mode": "absolute", "initial": 0.0, "statistics_every": 1}


def stale_direction(check_every: int, **numbers: Any) -> optax.GradientTransformation:
    """Shampoo with old roots, to which Nam and Ahn compare FOAM."""
    return scale_by_shampoo(refresh=every(check_every, offset=1), **PRINTED, **numbers)


def grafted(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As printed: the gradient is preconditioned, and Adam gives the length."""

    def make(rate: Any, *, b1: float, eps: float, **numbers: Any) -> Any:
        own = {"graft": grafts.adam(b1, eps), "eps": eps, **EXACT}
        return method(rate, **{**own, **numbers})

    return _with_adamw(make)


def _stale(rate: Any, *, check_every: int, **numbers: Any) -> Any:
    return shampoo(rate, refresh=every(check_every, offset=1), base=None, **{**PRINTED, **numbers})


stale_shampoo = grafted(_stale)


@_with_adamw
def soap_with_adamw(rate: Any, *, b2: float, check_every: int, **numbers: Any) -> Any:
    """SOAP, one decay rate for moments and factors."""
    own = {"refresh": check_every, "bias_correction": True, **EXACT}
    return soap(rate, b2=b2, b3=b2, **{**own, **numbers})


def as_code(direction: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As in the authors' code: averaged gradients, weighted means, Adam's first steps, blocks."""

    def make(
        rate: Any, *, b1: float, b2: float, eps: float, start: int, block_size: int, **numbers: Any
    ) -> Any:
        names = ("check_every", "threshold", "max_damping")
        own = {name: numbers.pop(name) for name in names if name in numbers}
        own |= {"graft": grafts.adam(b1, eps), "warmup_steps": start - 1, "bias_correction": True}
        rule = {"matrices": MatrixRule(block_size=block_size)}
        made = direction(b1=b1, b2=b2, eps=eps, **EXACT, **own)
        return assemble(made, rate, **{**rule, **numbers})

    return _with_adamw(make)
