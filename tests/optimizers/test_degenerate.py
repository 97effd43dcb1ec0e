"""Properties that hold for all gradients: degenerate ones by default, and weekly random ones.

An example is a few steps of gradients for a batch of three matrices, each with its own kind and
scale. A method is compiled once; everything else is data. A row of the registry states how long a
direction can be, for any gradients, where such a bound exists, and when a gradient comes again at
every step; with stale roots and bases few methods have a bound for gradients that change.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import curvax
from tests.cases import every_optimizer, in_turns
from tests.helpers import ALL_CELLS
from tests.registry import NAMED, REGISTRY, Row, Step

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
    "rank 1": lambda random, m, n: random.standard_normal((m, 1)) * random.standard_normal((1, n)),
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
ORDINARY = tuple(KINDS)[:10]  # squares stay in range under moderate scaling


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


EXTREME = -150, 127  # the exponents of float32, beyond those with squares in range


def example(seed: int) -> Example:
    """A random example: half are ordinary at all steps, half have any kind and scale."""
    random = np.random.default_rng(seed)

    def batch(kinds: tuple[str, ...], least: int, most: int) -> Batch:
        chosen = random.choice(kinds, BATCH).tolist(), random.integers(least, most + 1, BATCH)
        return Batch(tuple(chosen[0]), tuple(chosen[1].tolist()))

    of = (ORDINARY, -4, 4) if seed % 2 else (tuple(KINDS), *EXTREME)
    steps = tuple(batch(*of) for _ in range(random.integers(1, MOST_STEPS + 1)))
    return Example(seed, steps, batch(tuple(KINDS), *EXTREME))


# The properties.


LONG: dict[str, dict[str, Any]] = {
    "shampoo": {"side": "smaller"},
    "foam": {"matrices": curvax.MatrixRule(block_size=50)},
    "dr_shampoo": {"matrices": curvax.MatrixRule(block_size=50)},
}
"""For 10,000 rows: a factor of that order has 400 MB, and its decomposition takes hours.

What a user does about it: one side alone, or blocks.
"""


@functools.cache
def compiled(row: Row, shape: tuple[int, int], fuzzing: bool) -> tuple[Any, Any]:
    """The initial state and the jitted step, for a batch of matrices of one shape."""
    settings = row.for_fuzzing() if fuzzing else row.for_contract()
    settings |= LONG.get(row.name, {}) if max(shape) > 1000 else {}
    axes = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    optimizer = row.optimizer(1.0, **settings, weight_dimension_numbers=axes)
    weights = np.random.default_rng(0).standard_normal((BATCH, *shape))
    params = {"layers": {"kernel": weights.astype(np.float32)}}

    def step(gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        updates, state = optimizer.update({"layers": {"kernel": gradient}}, state, params)
        return updates["layers"]["kernel"], state

    return jax.jit(optimizer.init)(params), jax.jit(step)


def run(
    row: Row, shape: tuple[int, int], gradients: list[np.ndarray], fuzzing: bool = True
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The updates of all steps `(t, BATCH, m, n)` and the entries of the last state.

    They are finite, and the same to the last bit in a second run.
    """
    start, step = compiled(row, shape, fuzzing)
    found = []
    for _ in range(2):
        state, updates = start, []
        for gradient in gradients:
            update, state = step(gradient, state)
            updates.append(update)
        entries = jax.tree_util.tree_leaves_with_path(state)
        states = {jax.tree_util.keystr(k): np.asarray(x) for k, x in entries}
        found.append((np.stack(updates), states))
    (updates, state), (again, state_again) = found
    assert np.isfinite(updates).all(), "an update is not finite"
    bad = [name for name, x in state.items() if not np.isfinite(x).all()]
    assert not bad, f"the state is not finite: {', '.join(bad)}"
    np.testing.assert_array_equal(updates, again, "a second run differs")
    for name, x in state.items():
        np.testing.assert_array_equal(x, state_again[name], f"a second run differs: {name}")
    return updates, state


def check(row: Row, shape: tuple[int, int], example: Example) -> None:
    """Checks every property for one example."""
    gradients = example.gradients(*shape)
    updates, _ = run(row, shape, gradients)
    others, _ = run(row, shape, example.with_another_first(*shape))
    np.testing.assert_array_equal(
        updates[:, 1:], others[:, 1:], "another batch entry changes the update"
    )

    if row.longest is not None:
        assert_bounded(row.longest, gradients, updates)
    ordinary = all(kind in ORDINARY for step in example.steps for kind in step.kinds)
    within = all(abs(exponent) <= 4 for step in example.steps for exponent in step.exponents)
    if row.scale_free and ordinary and within:
        factor = np.float32(2.0 ** (1 + example.seed % 8))
        scaled, _ = run(row, shape, [factor * gradient for gradient in gradients])
        np.testing.assert_array_equal(scaled, updates, f"times {factor:g} changes the direction")


def assert_bounded(longest: Any, gradients: list[np.ndarray], updates: np.ndarray) -> None:
    """Checks every update against its bound. Gradients whose squares overflow count as zero.

    RACS, Fira and Apollo have no bound: they divide by scales that may be arbitrarily small. RACS
    and Fira limit the growth of the norm.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(np.square(np.stack(gradients)), axis=(-2, -1))  # float32 (t, BATCH)
        lengths = np.linalg.norm(np.stack(gradients).astype(np.float64), axis=(-2, -1))
    lengths = np.where(np.isfinite(squares), lengths, 0)
    found = np.linalg.norm(updates.astype(np.float64), axis=(-2, -1))
    for t, largest in enumerate(np.maximum.accumulate(lengths), start=1):
        for length, g, x in zip(found[t - 1], largest, gradients[t - 1], strict=True):
            bound = longest(Step(x.shape[-2], x.shape[-1], t, float(g), x))
            assert length <= 1.001 * bound, f"step {t}: length {length:.3g}, bound {bound:.3g}"


TIMES = (-100, -50, 50, 100)  # about 1e-30, 1e-15, 1e15, 1e30: squares beyond float32 count as 0
DEGENERATE = [
    (("zero", "constant", "rank 1"), (0, 0, 0)),
    (("one huge element", "denormal", "normal"), (0, 0, TIMES[0])),
    (("normal", "normal", "normal"), TIMES[1:]),
]
ODD = ((1, 5), (5, 1), (1, 1), (7, 13), (13, 7), (6, 6))


def odd_shapes(row: Row) -> tuple[tuple[int, int], ...]:
    return ODD if ALL_CELLS else (ODD[REGISTRY.index(row) // 3 % len(ODD)],)


def degenerate(shape: tuple[int, int], place: int) -> np.ndarray:
    return Example(place, (Batch(*DEGENERATE[place]),), Batch(("zero",), (0,))).gradients(*shape)[0]


def assert_bounded_if_repeated(row: Row, shape: tuple[int, int], gradient: np.ndarray) -> None:
    """And zero, where the gradient is zero or counts as zero."""
    gradients = [gradient] * 3
    updates, _ = run(row, shape, gradients, fuzzing=False)
    assert_bounded(row.longest_repeated, gradients, updates)
    with np.errstate(over="ignore"):
        squares = np.sum(np.square(gradient), axis=(-2, -1))
    nothing = ~np.isfinite(squares) | ~gradient.any(axis=(-2, -1))
    assert not updates[:, nothing].any()


@in_turns(0)
def test_the_same_degenerate_gradient_at_every_step(row: Row) -> None:
    for shape, place in itertools.product(odd_shapes(row), range(len(DEGENERATE))):
        assert_bounded_if_repeated(row, shape, degenerate(shape, place))


@in_turns(2, of=17)
def test_ten_thousand_rows(row: Row) -> None:
    for place in (1, 2):
        assert_bounded_if_repeated(row, (10_000, 8), degenerate((10_000, 8), place))


@in_turns(0)
def test_degenerate_gradients_between_ordinary_ones(row: Row) -> None:
    """Roots and bases are those of another gradient: finite all the same."""
    random = np.random.default_rng(0)
    for shape, place in itertools.product(odd_shapes(row), range(len(DEGENERATE))):
        before, after = random.standard_normal((2, BATCH, *shape)).astype(np.float32)
        run(row, shape, [before, degenerate(shape, place), after], fuzzing=False)


@pytest.mark.weekly
@every_optimizer
def test_nothing_is_found(row: Row) -> None:
    shape = SHAPES[7 * REGISTRY.index(row) % len(SHAPES)]
    for seed in range(EXAMPLES):
        check(row, shape, example(seed))


def tiny_leaves() -> dict[str, Any]:
    """1,000 of them: one stack of matrices."""
    return {f"layer_{i:03}": {"kernel": np.full((2, 2), 1 + i, np.float32)} for i in range(1_000)}


def stepped(name: str, gradients: Any) -> Any:
    """The updates of a first step, if they and the state have the structure that they should."""
    optimizer = NAMED[name].make(1.0)
    state = optimizer.init(gradients)
    updates, after = optimizer.update(gradients, state, gradients)
    assert len(jax.tree.leaves(state)) < 20
    assert jax.tree.structure(updates) == jax.tree.structure(gradients)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return updates


def test_a_thousand_tiny_leaves_with_random_keys_are_traced() -> None:
    """A key for each of them."""
    jax.eval_shape(functools.partial(stepped, "galore"), tiny_leaves())


def test_a_thousand_tiny_leaves_are_updated() -> None:
    @jax.jit
    def ends(gradients: Any) -> Any:  # of all other updates XLA compiles nothing: 6 ms each
        updates = stepped("racs", gradients)
        return updates["layer_000"]["kernel"], updates["layer_999"]["kernel"]

    gradients = tiny_leaves()
    for update in ends(gradients):
        np.testing.assert_allclose(update, -0.05 / 0.1 * np.ones((2, 2)), rtol=1e-5)


def test_bounds_are_of_directions_not_of_gradients() -> None:
    """The negative control: for a large gradient, all but Shampoo's are far below its length."""
    g = degenerate((7, 13), 2)[1]
    length = float(np.linalg.norm(g.astype(np.float64)))
    bounds = {row.name: row.longest_repeated(Step(7, 13, 3, length, g)) for row in REGISTRY}
    assert bounds.pop("shampoo") == length
    assert max(bounds.values()) < 1e-6 * length
