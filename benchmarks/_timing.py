"""Compiled steps that take turns, so that other work of the machine meets all of them alike."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm


class Program:
    """A compiled step from a state, which it takes over, to the next, and the times it took.

    It is traced at once and compiled when it is first needed (`compile_all`).
    """

    def __init__(self, step: Callable[..., Any], state: Any, *given: Any):
        """Traces `step(state, *given) -> (state, result)`, whose state is donated.

        JAX gives donated buffers to outputs of their shape in order: the state comes first, or the
        updates of square matrices take the buffers of its factors.
        """
        self.state, self.given = state, given
        self._lowered: Any = jax.jit(step, donate_argnums=0).lower(state, *given)
        self.times: list[float] = []

    @functools.cached_property
    def compiled(self) -> Any:
        """What JAX compiled."""
        return self._lowered.compile()

    def run(self) -> Any:
        """One step, timed in milliseconds, and its result."""
        step = self.compiled
        start = time.perf_counter()
        self.state, result = step(self.state, *self.given)
        jax.block_until_ready((self.state, result))
        self.times.append(1e3 * (time.perf_counter() - start))
        return result


def update_of(optimizer: optax.GradientTransformation, grads: Any) -> Program:
    """An optimizer's update from its first state; gradients are the parameters too."""

    def step(state: Any, grads: Any) -> Any:
        return optimizer.update(grads, state, grads)[::-1]

    return Program(step, jax.jit(optimizer.init)(grads), grads)


def compile_all(programs: Mapping[Any, Program]) -> None:
    """Compiles one for every two cores at a time."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        made = pool.map(lambda program: program.compiled, programs.values())
        for _ in tqdm(made, desc="compile", total=len(programs), file=sys.stderr):
            pass


def take_turns(
    programs: Mapping[Any, Program], rounds: int, name: str, seconds: float = float("inf")
) -> None:
    """A step of every program in each round, after one that does not count.

    Each round has another order: the program that ran before one, and left its arrays in the
    caches, changed times by up to 8 %.

    Args:
      programs: the programs that take turns.
      rounds: how often.
      name: shown beside the progress.
      seconds: a program whose steps took so long in all is left out from then on.
    """
    order = np.random.default_rng(0)
    turns = list(programs.values())
    for _ in tqdm(range(rounds + 1), desc=name, unit="round", file=sys.stderr):
        order.shuffle(turns)
        for program in turns:
            if sum(program.times[1:]) < 1e3 * seconds:
                program.run()


def percentile(times: Any, q: float) -> float:
    """The q-th percentile, NaN of nothing."""
    return float(np.percentile(times, q)) if len(times) else math.nan
