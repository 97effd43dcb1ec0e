"""A task, and a training run on it, compiled once for all numbers of an optimizer and seeds.

The numbers (learning rates, decay rates) and the batches are arguments of the compiled step.
Seconds are those of the steps, from one evaluation to the next; evaluations and compilation are not
among them. The batches of a seed are drawn before the run starts, so that a step's time is the
model's and the optimizer's.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax

from ._programs import whole_bytes


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and how long it is trained."""

    sizes: Mapping[str, Any]  # all that decides numbers
    data: Any  # given to `loss_of`
    params: Callable[[jax.Array], Any]  # from a random key
    batches: Callable[[int], jax.Array]  # from a seed: (steps, batch) places in the data
    loss_of: Callable[[Any, Any, jax.Array], jax.Array]  # of parameters, data and places
    evaluate: Callable[[Any], jax.Array]  # loss on validation data
    evaluations: int  # in a run
    test: Callable[[Any], dict[str, jax.Array]] = lambda params: {}  # looked at once, at the end

    @property
    def steps(self) -> int:
        """Of a run."""
        return self.sizes["steps"]

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // self.evaluations)


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


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

    def state_bytes(self, values: Mapping[str, Any]) -> int:
        """The bytes of the optimizer's state."""
        state = jax.eval_shape(self.init, values, self.like)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    def start(self, values: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
        """The state before the first step."""
        params = self.task.params(key)
        counts = {"step": jnp.zeros((), jnp.int32), "loss": jnp.zeros(())}
        return {"params": params, "opt_state": self.init(values, params), **counts}

    def compile(self, *given: Any) -> None:
        """Compiles the step for arguments like these, once."""
        if self.compiled is None:
            begin = self.clock()
            self.compiled = self.step.lower(*given).compile()
            self.compile_seconds = self.clock() - begin
            # The data are in memory with any optimizer.
            data = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given[1:]))
            self.step_bytes = whole_bytes(self.compiled) - data

    def train(self, values: Mapping[str, float], seed: int, last: bool) -> dict[str, Any]:
        """One run as a line of a file; it ends early where its loss is not finite.

        Args:
          values: the numbers of the optimizer.
          seed: of parameters and batches.
          last: evaluate at the end alone, not after every stretch of steps.

        Returns:
          `loss` at the end, `None` if the run ended early; at `steps`, by stretch, `losses` on
          validation data and `seconds`; `training`, the loss of each stretch's last batch; what is
          `tested` at the end; sizes and times of the program.
        """
        task = self.task
        numbers = {name: jnp.asarray(value) for name, value in values.items()}
        state: Any = self.start(numbers, jax.random.key(seed))
        given = task.data, task.batches(seed), numbers
        self.compile(state, *given)
        jax.block_until_ready((state, given))
        places, losses, times, training, tested = [], [], [], [], {}
        step, seconds = 0, 0.0
        while step < task.steps and all(map(math.isfinite, training)):
            stretch = min(task.eval_every, task.steps - step)
            begin = self.clock()
            for _ in range(stretch // self.at_once):
                state = self.compiled(state, *given)
            jax.block_until_ready(state)
            seconds += self.clock() - begin
            step += stretch
            training.append(float(state["loss"]))
            if not last or step == task.steps:
                kept = curvax.eval_params(state["opt_state"], state["params"])
                places.append(step)
                losses.append(float(task.evaluate(kept)))
                times.append(round(seconds, 4))
                seconds = 0.0
            if step == task.steps:
                self.params = kept
                tested = {name: float(x) for name, x in task.test(kept).items()}
        return {
            "loss": finite(losses)[-1] if places[-1:] == [task.steps] else None,
            "steps": places,
            "losses": finite(losses),
            "seconds": times,
            "training": finite(training),
            "tested": tested,
            "compile_seconds": round(self.compile_seconds, 1),
            "state_bytes": self.state_bytes(values),
            "step_bytes": self.step_bytes,
        }


def save(path: Path, params: Any) -> None:
    """Keeps parameters in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{path.name}")  # a torn file never has the name
    np.savez(part, *map(np.asarray, jax.tree.leaves(params)))
    part.rename(path)


def load(path: Path, like: Any) -> Any:
    """The parameters in a file, as a tree of this form."""
    with np.load(path) as stored:
        leaves = [jnp.asarray(stored[name]) for name in stored.files]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def finite(numbers: Sequence[float]) -> list[float | None]:
    """`None` in the place of others, which JSON does not have."""
    return [x if math.isfinite(x) else None for x in numbers]
