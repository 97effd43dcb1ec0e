"""One training run: a method on a task, compiled once for all learning rates and seeds.

Learning rate and batches are arguments of the compiled step. Seconds are those of the steps, from
one evaluation to the next; evaluations and compilation are not among them. The batches of a seed
are drawn before the run starts, so that a step's time is the model's and the optimizer's. Runs stop
after every stretch of steps, so that several can take turns.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from ._tasks import WEIGHT_DECAY, Task


class Watch(NamedTuple):
    """Something to look at in the state of a run at each evaluation."""

    name: str  # tells it from others in the cache
    look: Callable[[optax.GradientTransformation, Any], Any]  # of the optimizer and the run's state


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer: `make(rate, weight_decay=…, adam_learning_rate=…, **options)`."""

    make: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    watch: Watch | None = None  # in the runs at the best learning rate

    @property
    def call(self) -> str:
        """What is called, without weight decay and Adam's learning rate."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"{self.make.__name__}(rate{options})"

    @property
    def said(self) -> str:
        """What decides its numbers: the call, and the source of a function of these folders."""
        own = self.make.__module__.startswith(("benchmarks.", "__main__"))
        return f"{self.call}\n{inspect.getsource(self.make)}" if own else self.call


class Run(NamedTuple):
    """What one training run leaves."""

    steps: list[int]  # at which there are the following
    losses: list[float]  # on validation data
    seconds: list[float]  # of the steps since the evaluation before
    compile_seconds: float
    tested: dict[str, float]  # what the task tests at the end
    watched: list[Any]  # what a `Watch` saw

    @property
    def loss(self) -> float:
        """At the end; infinity if it is not finite."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    def steps_to(self, target: float) -> float:
        """Steps until the loss is down to `target`."""
        return steps_to(self.steps, self.losses, target)


def steps_to(steps: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Where the losses are down to `target`, on a straight line between two; infinity if never."""
    before = None
    for step, loss in zip(steps, losses, strict=True):
        if loss <= target:
            if before is None or not math.isfinite(before[1]):
                return step
            return step - (step - before[0]) * (target - loss) / (before[1] - loss)
        before = step, loss
    return math.inf


class Program:
    """Training with one method, compiled once for all learning rates and seeds."""

    def __init__(self, method: Method, task: Task):
        """Compiles nothing yet."""
        self.method, self.task = method, task
        self.like = jax.eval_shape(task.params, jax.random.key(0))
        self.init = jax.jit(self.optimizer(1.0, 1.0).init)
        self.compiled: Any = None
        self.compile_seconds = 0.0

        def step(state: Any, data: Any, batches: jax.Array, rate: Any, adam_rate: Any) -> Any:
            places = batches[state["step"]]
            grads = jax.grad(task.loss_of)(state["params"], data, places)
            updates, opt_state = self.optimizer(rate, adam_rate).update(
                grads, state["opt_state"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

        self.step = jax.jit(step, donate_argnums=0)

    def optimizer(self, rate: Any, adam_rate: Any) -> optax.GradientTransformation:
        """The optimizer, on the task's schedule; rates may be traced."""
        schedule = self.task.schedule()
        return self.method.make(
            lambda count: rate * schedule(count),
            weight_decay=WEIGHT_DECAY,
            adam_learning_rate=lambda count: adam_rate * schedule(count),
            **self.method.options,
        )

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state."""
        return curvax.state_bytes(self.optimizer(1.0, 1.0), self.like)

    def compile(self, *given: Any) -> None:
        """Compiles the step for arguments like these, once."""
        if self.compiled is None:
            start = time.perf_counter()
            self.compiled = self.step.lower(*given).compile()
            self.compile_seconds = time.perf_counter() - start

    def train(
        self, rate: float, adam_rate: float, seed: int, last: bool, watch: Watch | None = None
    ) -> Iterator[Run]:
        """One run: what there is of it after each stretch of steps.

        Args:
          rate: learning rate of the matrices.
          adam_rate: learning rate of the others.
          seed: of parameters and batches.
          last: evaluate at the end alone, not after every stretch.
          watch: what else to look at, at each evaluation.
        """
        task = self.task
        params = task.params(jax.random.key(seed))
        state: Any = {"params": params, "opt_state": self.init(params)}
        state["step"] = jnp.zeros((), jnp.int32)
        given = task.data, task.batches(seed), jnp.asarray(rate), jnp.asarray(adam_rate)
        self.compile(state, *given)
        look = watch and jax.jit(functools.partial(watch.look, self.optimizer(1.0, 1.0)))
        run = Run([], [], [], self.compile_seconds, {}, [])
        jax.block_until_ready((state, given))
        step, seconds = 0, 0.0
        while step < task.steps:
            stretch = min(task.eval_every, task.steps - step)
            begin = time.perf_counter()
            for _ in range(stretch):
                state = self.compiled(state, *given)
            jax.block_until_ready(state)
            seconds += time.perf_counter() - begin
            step += stretch
            if not last or step == task.steps:
                run.steps.append(step)
                run.seconds.append(seconds)
                run.losses.append(float(task.evaluate(state["params"])))
                if look is not None:
                    run.watched.append(jax.tree.map(lambda x: np.asarray(x).tolist(), look(state)))
                seconds = 0.0
            if step == task.steps:
                run.tested.update({k: float(x) for k, x in task.test(state["params"]).items()})
            yield run
