"""One training run: an optimizer on a task, compiled once for all its numbers and seeds.

The numbers (learning rates, decay rates) and the batches are arguments of the compiled step.
Seconds are those of the steps, from one evaluation to the next; evaluations and compilation are not
among them. The batches of a seed are drawn before the run starts, so that a step's time is the
model's and the optimizer's. Runs stop after every stretch of steps, so that several can take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import curvax

from ._programs import whole_bytes
from ._tasks import Task


class Run(NamedTuple):
    """The result of one training run."""

    steps: list[int]  # at which there are the following
    losses: list[float]  # on validation data
    seconds: list[float]  # of the steps since the evaluation before
    compile_seconds: float
    tested: dict[str, float]  # what the task tests at the end
    training: list[float]  # the loss of the last batch of each stretch

    @property
    def loss(self) -> float:
        """At the end; infinity if it is not finite."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


class Program:
    """Training with one optimizer, compiled once for all its numbers and seeds.

    Args:
      make: the optimizer, from numbers by name, which may be traced.
      task: the model and its data.
      clock: the clock of the seconds: of the day, or `time.process_time` beside other load.
      scanned: whether the steps between two evaluations are one program, so that an accelerator
        does not wait for Python.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], optax.GradientTransformation],
        task: Task,
        clock: Callable[[], float] = time.perf_counter,
        scanned: bool = False,
    ):
        """Compiles nothing yet."""
        self.make, self.task, self.clock = make, task, clock
        self.at_once = task.eval_every if scanned else 1  # steps of a call
        self.params: Any = None  # at the end of the last run
        self.like = jax.eval_shape(task.params, jax.random.key(0))
        self.init = jax.jit(lambda values, params: make(values).init(params))
        self.compiled: Any = None
        self.compile_seconds, self.step_bytes = 0.0, 0

        def step(state: Any, data: Any, batches: jax.Array, values: Any) -> Any:
            places = batches[state["step"]]
            loss, grads = jax.value_and_grad(task.loss_of)(state["params"], data, places)
            optimizer = optax.with_extra_args_support(make(values))
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            step = state["step"] + 1
            return {"params": params, "opt_state": opt_state, "step": step, "loss": loss}

        def steps(state: Any, *given: Any) -> Any:
            return jax.lax.scan(lambda x, _: (step(x, *given), None), state, length=self.at_once)[0]

        self.step = jax.jit(steps if scanned else step, donate_argnums=0)

    def state_bytes(self, values: Mapping[str, float]) -> int:
        """The bytes of the optimizer's state."""
        state = jax.eval_shape(self.init, values, self.like)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    def compile(self, *given: Any) -> None:
        """Compiles the step for arguments like these, once."""
        if self.compiled is None:
            self.traced(*given)()

    def traced(self, *given: Any) -> Callable[[], None]:
        """Traces the step for arguments like these; its result compiles it."""
        start = self.clock()
        lowered = self.step.lower(*given)
        # The data are in memory with any optimizer.
        data = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given[1:]))

        def compile_it() -> None:
            self.compiled = lowered.compile()
            self.compile_seconds = self.clock() - start
            self.step_bytes = whole_bytes(self.compiled) - data

        return compile_it

    def train(self, values: Mapping[str, float], seed: int, last: bool) -> Iterator[Run]:
        """One run: its result so far after each stretch of steps.

        Args:
          values: the numbers of the optimizer.
          seed: of parameters and batches.
          last: evaluate at the end alone, not after every stretch.
        """
        task = self.task
        numbers = {name: jnp.asarray(value) for name, value in values.items()}
        params = task.params(jax.random.key(seed))
        state: Any = {"params": params, "opt_state": self.init(numbers, params)}
        state |= {"step": jnp.zeros((), jnp.int32), "loss": jnp.zeros(())}
        given = task.data, task.batches(seed), numbers
        self.compile(state, *given)
        run = Run([], [], [], self.compile_seconds, {}, [])
        jax.block_until_ready((state, given))
        step, seconds = 0, 0.0
        while step < task.steps:
            stretch = min(task.eval_every, task.steps - step)
            begin = self.clock()
            for _ in range(stretch // self.at_once):
                state = self.compiled(state, *given)
            jax.block_until_ready(state)
            seconds += self.clock() - begin
            step += stretch
            run.training.append(float(state["loss"]))
            if not last or step == task.steps:
                run.steps.append(step)
                run.seconds.append(seconds)
                kept = curvax.eval_params(state["opt_state"], state["params"])
                run.losses.append(float(task.evaluate(kept)))
                seconds = 0.0
            if step == task.steps:
                self.params = kept
                run.tested.update({k: float(x) for k, x in task.test(kept).items()})
            yield run
