"""Properties that hold for all gradients, and a strategy that searches for counterexamples.

An example is a few steps of gradients for a batch of three matrices, each with its own kind and
scale. A method is compiled once; everything else is data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import curvax
from tests.cases import every_optimizer
from tests.registry import REGISTRY, Row, Step

EXAMPLES = 200  # for each method
BATCH = 3
MOST_STEPS = 4
# Vectors and scalars as matrices, square, prime, wide and tall.
SHAPES = (
    *((1, 1), (1, 2), (2, 1), (1, 7), (7, 1)),
    *((2, 2), (3, 3), (4, 4), (7, 7), (8, 8)),
    *((2, 3), (3, 2), (3, 5), (5, 3), (2, 13), (13, 2)),
    *((7, 11), (11, 7), (5, 16), (16, 5)),
)

# Examples.


def _low_rank(random: np.random.Generator, m: int, n: int) -> np.ndarray:
    rank = random.integers(1, min(m, n) + 1)
    return random.standard_normal((m, rank)) @ random.standard_normal((rank, n))


def _with(value: float, random: np.random.Generator, m: int, n: int) -> np.ndarray:
    x = random.standard_normal((m, n))
    x[random.integers(m), random.integers(n)] = value
    return x


def _sparse(random: np.random.Generator, m: int, n: int) -> np.ndarray:
    return random.standard_normal((m, n)) * (random.random((m, n)) < 0.3)


def _graded(random: np.random.Generator, m: int, n: int) -> np.ndarray:
    rows, columns = 10.0 ** -random.integers(0, 5, m), 10.0 ** -random.integers(0, 5, n)
    return rows[:, None] * random.standard_normal((m, n)) * columns


def _diagonal(random: np.random.Generator, m: int, n: int) -> np.ndarray:
    x = np.zeros((m, n))
    np.fill_diagonal(x, 10.0 ** -random.integers(0, 8, min(m, n)))
    return x


KINDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "zero": lambda random, m, n: np.zeros((m, n)),
    "constant": lambda random, m, n: np.full((m, n), random.standard_normal()),
    "normal": lambda random, m, n: random.standard_normal((m, n)),
    "integers": lambda random, m, n: random.integers(-2, 3, (m, n)).astype(float),
    "low rank": _low_rank,
    "sparse": _sparse,
    "graded": _graded,
    "diagonal": _diagonal,
    "one huge element": functools.partial(_with, 1e6),
    "denormal": lambda random, m, n: 2.0**-140 * random.standard_normal((m, n)),
    "NaN": functools.partial(_with, math.nan),
    "infinite": functools.partial(_with, math.inf),
    "minus infinite": functools.partial(_with, -math.inf),
}
ORDINARY = tuple(KINDS)[:9]  # squares stay in range under moderate scaling


class Batch(NamedTuple):
    """A batch of gradients: the kind of each matrix, and its scale as a power of two."""

    kinds: tuple[str, ...]
    exponents: tuple[int, ...]


class Example(NamedTuple):
    """A few steps of gradients for a batch of matrices."""

    seed: int
    steps: tuple[Batch, ...]
    other: Batch  # replaces the first matrix at every step

    def gradients(self, m: int, n: int) -> list[np.ndarray]:
        """The batches, `(BATCH, m, n)` each."""
        return [self._batch(m, n, t, step) for t, step in enumerate(self.steps)]

    def with_another_first(self, m: int, n: int) -> list[np.ndarray]:
        """The same batches with another first matrix."""
        batches = []
        for t, batch in enumerate(self.gradients(m, n)):
            batches.append(batch.copy())
            batches[-1][0] = self._batch(m, n, t + MOST_STEPS, self.other)[0]
        return batches

    def _batch(self, m: int, n: int, place: int, step: Batch) -> np.ndarray:
        random = np.random.default_rng([self.seed, place])
        drawn = [
            np.ldexp(KINDS[kind](random, m, n), exponent)
            for kind, exponent in zip(step.kinds, step.exponents, strict=True)
        ]
        with np.errstate(over="ignore"):
            return np.stack(drawn).astype(np.float32)


def steps(kinds: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[Batch]:
    """A strategy for batches of these kinds, with exponents from `least` to `most`."""
    kind, exponent = st.sampled_from(kinds), st.integers(least, most)
    several = [st.tuples(*[strategy] * BATCH) for strategy in (kind, exponent)]
    return st.builds(Batch, *several)


EXTREME = -150, 127  # the exponents of float32, beyond those with squares in range


def examples() -> st.SearchStrategy[Example]:
    """A strategy for examples: half are ordinary at all steps, half have any kind and scale."""

    def example(kinds: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[Example]:
        of_any = steps(kinds, least, most)
        several = st.lists(of_any, min_size=1, max_size=MOST_STEPS).map(tuple)
        return st.builds(Example, st.integers(0, 2**32 - 1), several, steps(tuple(KINDS), *EXTREME))

    return example(ORDINARY, -4, 4) | example(tuple(KINDS), *EXTREME)


# The properties.


@functools.cache
def compiled(row: Row, shape: tuple[int, int]) -> tuple[Any, Any]:
    """The initial state and the jitted step, for a batch of matrices of one shape."""
    optimizer = row.optimizer(
        1.0,
        weight_dimension_numbers={"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)},
        **row.for_fuzzing(),
    )
    weights = np.random.default_rng(0).standard_normal((BATCH, *shape))
    params = {"layers": {"kernel": weights.astype(np.float32)}}

    def step(gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        updates, state = optimizer.update({"layers": {"kernel": gradient}}, state, params)
        return updates["layers"]["kernel"], state

    return jax.jit(optimizer.init)(params), jax.jit(step)


def run(
    row: Row, shape: tuple[int, int], gradients: list[np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The updates of all steps `(t, BATCH, m, n)` and the entries of the last state."""
    state, step = compiled(row, shape)
    updates = []
    for gradient in gradients:
        update, state = step(gradient, state)
        updates.append(update)
    entries = jax.tree_util.tree_leaves_with_path(state)
    return np.stack(updates), {jax.tree_util.keystr(k): np.asarray(x) for k, x in entries}


def check(row: Row, shape: tuple[int, int], example: Example) -> None:
    """Checks every property for one example."""
    gradients = example.gradients(*shape)
    updates, state = run(row, shape, gradients)
    assert np.isfinite(updates).all(), "an update is not finite"
    bad = [name for name, x in state.items() if not np.isfinite(x).all()]
    assert not bad, f"the state is not finite: {', '.join(bad)}"

    again, state_again = run(row, shape, gradients)
    np.testing.assert_array_equal(updates, again, "a second run differs")
    for name, x in state.items():
        np.testing.assert_array_equal(x, state_again[name], f"a second run differs: {name}")

    others, _ = run(row, shape, example.with_another_first(*shape))
    np.testing.assert_array_equal(
        updates[:, 1:], others[:, 1:], "another batch entry changes the update"
    )

    if row.longest is not None:
        assert_bounded(row, gradients, updates)
    ordinary = all(kind in ORDINARY for step in example.steps for kind in step.kinds)
    within = all(abs(exponent) <= 4 for step in example.steps for exponent in step.exponents)
    if row.scale_free and ordinary and within:
        factor = np.float32(2.0 ** (1 + example.seed % 8))
        scaled, _ = run(row, shape, [factor * gradient for gradient in gradients])
        np.testing.assert_array_equal(scaled, updates, f"times {factor:g} changes the direction")


def assert_bounded(row: Row, gradients: list[np.ndarray], updates: np.ndarray) -> None:
    """Checks every update against its bound. Gradients whose squares overflow count as zero.

    RACS, Fira and Apollo have no bound: they divide by scales that may be arbitrarily small. RACS
    and Fira limit the growth of the norm.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(np.square(np.stack(gradients)), axis=(-2, -1))  # float32 (t, BATCH)
        lengths = np.linalg.norm(np.stack(gradients).astype(np.float64), axis=(-2, -1))
    lengths = np.where(np.isfinite(squares), lengths, 0)
    found = np.linalg.norm(updates.astype(np.float64), axis=(-2, -1))
    assert row.longest is not None
    for t, largest in enumerate(np.maximum.accumulate(lengths), start=1):
        for length, g, x in zip(found[t - 1], largest, gradients[t - 1], strict=True):
            bound = row.longest(Step(x.shape[-2], x.shape[-1], t, float(g), x))
            assert length <= 1.001 * bound, f"step {t}: length {length:.3g}, bound {bound:.3g}"


@pytest.mark.weekly
@every_optimizer
def test_nothing_is_found(row: Row) -> None:
    shape = SHAPES[7 * REGISTRY.index(row) % len(SHAPES)]
    ran = []

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @hypothesis.given(examples())
    def holds(example: Example) -> None:
        check(row, shape, example)
        ran.append(example)

    holds()
    assert len(ran) >= EXAMPLES
