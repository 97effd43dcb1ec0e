"""Properties that hold for all gradients: degenerate ones by default, and weekly random ones.

An example is a few steps of gradients for a batch of three matrices, each with its own kind and
scale. A method is compiled once; everything else is data. A row of the registry states how long a
direction can be, for any gradients, where such a bound exists, and when a gradient comes again at
every step; with stale roots and bases few methods have a bound for gradients that change.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.cases import every_optimizer
from tests.cells import cells
from tests.registry import NAMED, REGISTRY, Row, Step
from tests.registry._bounds import assert_bounded

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


def _powers(random: np.random.Generator, most: int, *shape: int) -> np.ndarray:
    return 10.0 ** -random.integers(0, most, shape)


def _low_rank(random: np.random.Generator, m: int, n: int) -> np.ndarray:
    rank = random.integers(1, min(m, n) + 1)
    return random.standard_normal((m, rank)) @ random.standard_normal((rank, n))


def _with(value: float, random: np.random.Generator, m: int, n: int) -> np.ndarray:
    x = random.standard_normal((m, n))
    x[random.integers(m), random.integers(n)] = value
    return x


KINDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "zero": lambda random, m, n: np.zeros((m, n)),
    "constant": lambda random, m, n: np.full((m, n), random.standard_normal()),
    "normal": lambda random, m, n: random.standard_normal((m, n)),
    "integers": lambda random, m, n: random.integers(-2, 3, (m, n)).astype(float),
    "rank 1": lambda random, m, n: random.standard_normal((m, 1)) * random.standard_normal((1, n)),
    "low rank": _low_rank,
    "sparse": lambda random, m, n: random.standard_normal((m, n)) * (random.random((m, n)) < 0.3),
    "graded": lambda random, m, n: (
        _powers(random, 5, m, 1) * random.standard_normal((m, n)) * _powers(random, 5, 1, n)
    ),
    "diagonal": lambda random, m, n: np.eye(m, n) * _powers(random, 8, 1, n),
    "one huge element": functools.partial(_with, 1e6),
    "denormal": lambda random, m, n: 2.0**-140 * random.standard_normal((m, n)),
    "NaN": functools.partial(_with, math.nan),
    "infinite": functools.partial(_with, math.inf),
    "minus infinite": functools.partial(_with, -math.inf),
}
ORDINARY = tuple(KINDS)[:10]  # squares stay in range under moderate scaling
EXTREME = -150, 127  # the exponents of float32, beyond those with squares in range


def batch(random: np.random.Generator, shape: tuple[int, int], of: Any) -> np.ndarray:
    """Gradients of these kinds, times these powers of two."""
    with np.errstate(over="ignore"):
        drawn = [np.ldexp(KINDS[kind](random, *shape), exponent) for kind, exponent in of]
        return np.stack(drawn).astype(np.float32)


def example(seed: int, shape: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random gradients of some steps, and the same with another first matrix.

    With an odd seed they are ordinary, otherwise of any kind and scale; the other is of any.
    """
    random = np.random.default_rng(seed)

    def drawn(number: int, kinds: Sequence[str], least: int, most: int) -> np.ndarray:
        exponents = random.integers(least, most + 1, number)
        return batch(random, shape, zip(random.choice(kinds, number), exponents, strict=True))

    of = (ORDINARY, -4, 4) if seed % 2 else ([*KINDS], *EXTREME)
    gradients = [drawn(BATCH, *of) for _ in range(random.integers(1, MOST_STEPS + 1))]
    return gradients, [np.append(drawn(1, [*KINDS], *EXTREME), g[1:], axis=0) for g in gradients]


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
) -> np.ndarray:
    """The updates of all steps `(t, BATCH, m, n)`.

    They and the last state are finite, and the same to the last bit in a second run.
    """
    start, step = compiled(row, shape, fuzzing)
    found = []
    for _ in range(2):
        state, updates = start, []
        for gradient in gradients:
            update, state = step(gradient, state)
            updates.append(update)
        found.append({"updates": np.stack(updates), "state": jax.device_get(state)})
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True
    ):
        assert np.isfinite(x).all(), f"{jax.tree_util.keystr(path)} is not finite"
        np.testing.assert_array_equal(x, y, f"a second run differs: {jax.tree_util.keystr(path)}")
    return found[0]["updates"]


def check(row: Row, shape: tuple[int, int], seed: int) -> None:
    """Checks every property for one example."""
    gradients, others = example(seed, shape)
    updates = run(row, shape, gradients)
    np.testing.assert_array_equal(
        updates[:, 1:], run(row, shape, others)[:, 1:], "another batch entry changes the update"
    )
    if row.longest is not None:
        assert_bounded(row.longest, gradients, updates)
    if row.scale_free and seed % 2:
        factor = np.float32(2.0 ** (1 + seed % 8))
        scaled = run(row, shape, [factor * gradient for gradient in gradients])
        np.testing.assert_array_equal(scaled, updates, f"times {factor:g} changes the direction")


TIMES = (-100, -50, 50, 100)  # about 1e-30, 1e-15, 1e15, 1e30: squares beyond float32 count as 0
DEGENERATE = (
    (("zero", 0), ("constant", 0), ("rank 1", 0)),
    (("one huge element", 0), ("denormal", 0), ("normal", TIMES[0])),
    tuple(("normal", exponent) for exponent in TIMES[1:]),
)
ODD = ((1, 5), (5, 1), (1, 1), (7, 13), (13, 7), (6, 6))


def degenerate(shape: tuple[int, int], place: int) -> np.ndarray:
    return batch(np.random.default_rng(place), shape, DEGENERATE[place])


def assert_bounded_if_repeated(row: Row, shape: tuple[int, int], gradient: np.ndarray) -> None:
    """And zero, where the gradient is zero or counts as zero."""
    gradients = [gradient] * 3
    updates = run(row, shape, gradients, fuzzing=False)
    assert_bounded(row.longest_repeated, gradients, updates)
    with np.errstate(over="ignore"):
        squares = np.sum(np.square(gradient), axis=(-2, -1))
    nothing = ~np.isfinite(squares) | ~gradient.any(axis=(-2, -1))
    assert not updates[:, nothing].any()


@pytest.mark.parametrize(("row", "shape"), cells(REGISTRY, ODD, of=36))
def test_degenerate_gradients(row: Row, shape: tuple[int, int]) -> None:
    """At every step; and between others, where roots and bases are those of another gradient."""
    random = np.random.default_rng(0)
    for place in range(len(DEGENERATE)):
        assert_bounded_if_repeated(row, shape, degenerate(shape, place))
        before, after = random.standard_normal((2, BATCH, *shape)).astype(np.float32)
        run(row, shape, [before, degenerate(shape, place), after], fuzzing=False)


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_ten_thousand_rows(row: Row) -> None:
    for place in (1, 2):
        assert_bounded_if_repeated(row, (10_000, 8), degenerate((10_000, 8), place))


@pytest.mark.weekly
@every_optimizer
def test_nothing_is_found(row: Row) -> None:
    shape = SHAPES[7 * REGISTRY.index(row) % len(SHAPES)]
    for seed in range(EXAMPLES):
        check(row, shape, seed)


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
