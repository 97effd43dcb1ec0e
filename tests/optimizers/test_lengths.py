"""How long updates get, whatever comes and goes: bounds that the rows of the registry state.

A matrix may get no gradient for many steps (an expert without tokens), one at every fifth step, the
same gradient for ever, or one that changes its sign; it may be zero, of rank 1, or beyond what
float32 can square. All of these are matrices of one batch, and one program. Every week there are
random ones too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.directions._moment_ratio import largest_ratio
from tests.cases import every_optimizer
from tests.cells import cells
from tests.helpers import trajectory
from tests.registry import NAMED, REGISTRY, Row, Step
from tests.registry._bounds import assert_bounded

STEPS = 60
# Vectors and scalars as matrices, square, prime, wide and tall.
SHAPES = (
    *((1, 1), (1, 2), (2, 1), (1, 7), (7, 1)),
    *((2, 2), (3, 3), (4, 4), (7, 7), (8, 8)),
    *((2, 3), (3, 2), (3, 5), (5, 3), (2, 13), (13, 2)),
    *((7, 11), (11, 7), (5, 16), (16, 5)),
)

# Gradients.


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


def paused(m: int, n: int) -> dict[str, np.ndarray]:
    """Gradients `(STEPS, m, n)`."""
    random = np.random.default_rng(0)
    time = np.arange(STEPS)[:, None, None]
    noise, one = random.standard_normal((STEPS, m, n)), random.standard_normal((m, n))
    found = {
        "at every step": noise,
        "at every fifth step": np.where(time % 5 == 0, noise, 0),
        "at every fifth step from the fifth": np.where(time % 5 == 4, noise, 0),
        "30 zeros first": np.where(time >= 30, noise, 0),
        "30 zeros later": np.where((time < 15) | (time >= 45), noise, 0),
        "G, -G": np.where(time % 2, -one, one),
        "constant": np.where(time >= 0, one, 0),
        "rank 1": noise[:, :, :1] * random.standard_normal((STEPS, 1, n)),
    }
    return {name: g.astype(np.float32) for name, g in found.items()}


DEGENERATE = (  # powers of about 1e-30, 1e-15, 1e15, 1e30: squares beyond float32 count as 0
    *(("zero", 0), ("constant", 0), ("rank 1", 0), ("one huge element", 0), ("denormal", 0)),
    *(("normal", exponent) for exponent in (-100, -50, 50, 100)),
)


def degenerate(m: int, n: int, steps: int) -> np.ndarray:
    """Gradients that come again at every step, `(steps, kind, m, n)`."""
    found = batch(np.random.default_rng(0), (m, n), DEGENERATE)
    return np.broadcast_to(found, (steps, *found.shape))


# Updates.


@functools.cache
def compiled(row: Row, batch: int, shape: tuple[int, int], fuzzing: bool, more: Any = ()) -> Any:
    """From gradients `(t, batch, m, n)` to updates, and whether the states are finite."""
    settings = {**(row.for_fuzzing() if fuzzing else row.for_contract()), **dict(more)}
    axes = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    optimizer = row.optimizer(1.0, **settings, weight_dimension_numbers=axes)
    weights = np.random.default_rng(0).standard_normal((batch, *shape))
    params = {"layers": {"kernel": weights.astype(np.float32)}}

    def step(state: Any, gradient: jax.Array) -> Any:
        updates, state = optimizer.update({"layers": {"kernel": gradient}}, state, params)
        leaves = jax.tree.leaves(state)
        finite = [jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return state, (updates["layers"]["kernel"], jnp.array(finite).all())

    return jax.jit(lambda g: jax.lax.scan(step, optimizer.init(params), g)[1])


def run(row: Row, gradients: np.ndarray, fuzzing: bool = False, **more: Any) -> np.ndarray:
    """Updates, which are finite as states are, and the same to the last bit in a second run."""
    of = compiled(row, gradients.shape[1], gradients.shape[2:], fuzzing, tuple(more.items()))
    (updates, finite), (again, _) = (jax.device_get(of(gradients)) for _ in range(2))
    assert finite.all() and np.isfinite(updates).all(), "not finite"
    np.testing.assert_array_equal(updates, again, "a second run differs")
    return updates


def assert_bounded_if_repeated(row: Row, gradients: np.ndarray, updates: np.ndarray) -> None:
    """And zero, where the gradient is zero or counts as zero."""
    assert_bounded(row.longest_repeated, [*gradients], updates)
    with np.errstate(over="ignore"):
        squares = np.sum(np.square(gradients[0]), axis=(-2, -1))
    nothing = ~np.isfinite(squares) | ~gradients[0].any(axis=(-2, -1))
    assert not updates[:, nothing].any()


STORAGES = {
    "32 bits": None,
    "4 bits": curvax.quantized(min_elements=1),
    "Cholesky": curvax.cholesky(min_elements=1, error_feedback=0.95),
}
ODD = ((1, 5), (5, 1), (1, 1), (7, 13), (13, 7), (6, 6), (8, 12))
CODED = cells([row for row in REGISTRY if row.factors], list(STORAGES)[1:], of=28)
BOUNDED = [(row, shape, "32 bits") for row, shape in cells(REGISTRY, ODD, of=40)]
BOUNDED += [(row, (8, 12), storage) for row, storage in CODED]


@pytest.mark.parametrize(("row", "shape", "storage"), BOUNDED)
def test_updates_are_within_the_row_s_bounds(
    row: Row, shape: tuple[int, int], storage: str
) -> None:
    """With pauses; and with degenerate gradients, always or between others, where roots and bases
    are those of another gradient."""
    always = degenerate(*shape, STEPS)
    between = np.random.default_rng(0).standard_normal(always.shape).astype(np.float32)
    between[1::3] = always[1::3]
    with_pauses = np.stack([*paused(*shape).values()], axis=1)
    gradients = np.concatenate([always, between, with_pauses], axis=1)
    updates = run(
        row, gradients, **({} if storage == "32 bits" else {"storage": STORAGES[storage]})
    )
    number = always.shape[1]
    assert_bounded_if_repeated(row, always, updates[:, :number])
    assert_bounded(row.longest or row.longest_repeated, [*with_pauses], updates[:, 2 * number :])


LONG: dict[str, dict[str, Any]] = {
    "shampoo": {"side": "smaller"},
    "foam": {"matrices": curvax.MatrixRule(block_size=50)},
    "dr_shampoo": {"matrices": curvax.MatrixRule(block_size=50)},
}
"""For 10,000 rows: a factor of that order has 400 MB, and its decomposition takes hours.

What a user does about it: one side alone, or blocks.
"""


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_ten_thousand_rows(row: Row) -> None:
    gradients = degenerate(10_000, 8, 3)[:, 3:]
    assert_bounded_if_repeated(row, gradients, run(row, gradients, **LONG.get(row.name, {})))


def example(seed: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Random gradients of four steps, and the same with another first matrix.

    With an odd seed they are ordinary, otherwise of any kind and scale; the other is of any.
    """
    random = np.random.default_rng(seed)

    def drawn(number: int, kinds: Sequence[str], least: int, most: int) -> np.ndarray:
        exponents = random.integers(least, most + 1, number)
        return batch(random, shape, zip(random.choice(kinds, number), exponents, strict=True))

    of = (ORDINARY, -4, 4) if seed % 2 else ([*KINDS], *EXTREME)
    gradients = np.stack([drawn(3, *of) for _ in range(4)])
    others = gradients.copy()
    others[:, 0] = [drawn(1, [*KINDS], *EXTREME)[0] for _ in range(4)]
    return gradients, others


@pytest.mark.weekly
@every_optimizer
def test_nothing_is_found(row: Row) -> None:
    shape = SHAPES[7 * REGISTRY.index(row) % len(SHAPES)]
    for seed in range(200):
        gradients, others = example(seed, shape)
        updates = run(row, gradients, fuzzing=True)
        same = updates[:, 1:], run(row, others, fuzzing=True)[:, 1:]
        np.testing.assert_array_equal(*same, "another batch entry changes the update")
        if row.longest is not None:
            assert_bounded(row.longest, [*gradients], updates)
        if row.scale_free and seed % 2:
            factor = np.float32(2.0 ** (1 + seed % 8))
            scaled = run(row, factor * gradients, fuzzing=True)
            np.testing.assert_array_equal(
                scaled, updates, f"times {factor:g} changes the direction"
            )


def test_bounds_are_of_directions_not_of_gradients() -> None:
    """The negative control: for a large gradient, all but Shampoo's are far below its length."""
    g = degenerate(7, 13, 1)[0, -2]
    length = float(np.linalg.norm(g.astype(np.float64)))
    bounds = {row.name: row.longest_repeated(Step(7, 13, 3, length, g)) for row in REGISTRY}
    assert bounds.pop("shampoo") == length
    assert max(bounds.values()) < 1e-6 * length


# Root mean squares of methods that limit them, and of the same methods without a limit.

M, N = 32, 64
INF = float("inf")
FRESH = (min(M, N) / 0.05 / (M * N)) ** 0.5  # the bound of fresh roots with b2 = 0.95
soap, asgo = curvax.scale_by_soap, functools.partial(curvax.scale_by_asgo, refresh=10)
shampoo = functools.partial(curvax.scale_by_shampoo, statistics_every=1, refresh=10)


class Limited(NamedTuple):
    """A limited direction and its bound; and an unlimited one, with what is longer there."""

    ours: Any
    bound: float
    alone: Any = None
    longer: tuple[str, float] | None = None


EVERY_FIFTH = "at every fifth step"
LIMITED = {
    "SOAP": Limited(soap(refresh=10), 1, soap(refresh=10, limit=INF), (EVERY_FIFTH, 3)),
    # Codes of a statistic in its basis do not turn the eigenvectors of a constant gradient.
    "SOAP, 4 bits": Limited(
        soap(storage=STORAGES["4 bits"]),
        1,
        soap(storage=STORAGES["4 bits"], limit=INF),
        (EVERY_FIFTH, 1.05),
    ),
    "SOAP, Cholesky": Limited(soap(storage=STORAGES["Cholesky"]), 1),
    "fresh ASGO": Limited(curvax.scale_by_asgo(), float(largest_ratio(0.9, 0.95)) * N**-0.5),
    "ASGO, 32 bits": Limited(asgo(limit=True), FRESH, asgo(), ("rank 1", 10)),
    **{
        f"ASGO, {x}": Limited(asgo(limit=True, storage=STORAGES[x]), FRESH)
        for x in ("4 bits", "Cholesky")
    },
    **{
        f"Shampoo, {x}": Limited(
            shampoo(graft="limit", storage=storage),
            FRESH,
            shampoo(graft=None, storage=storage),
            ("30 zeros first", 2000),
        )
        for x, storage in STORAGES.items()
    },
}


def root_mean_squares(transformation: Any) -> dict[str, float]:
    """The largest of every case."""
    given = paused(M, N)
    together = np.stack([*given.values()], axis=1)
    found = np.float64(jax.jit(trajectory(transformation))(together, np.ones_like(together[0]))[0])
    largest = np.sqrt(np.mean(found**2, axis=(-2, -1))).max(axis=0)
    return dict(zip(given, map(float, largest), strict=True))


@pytest.mark.parametrize("name", cells(LIMITED, of=6))
def test_limits_keep_their_bounds_and_what_has_none_does_not(name: str) -> None:
    """Where it does, the limit changes nothing."""
    case = LIMITED[name]
    found = root_mean_squares(case.ours)
    bounds = dict.fromkeys(found, 1.001 * case.bound)
    if "Shampoo" in name:  # the direction is the gradient until the first refresh after a gradient
        first = {k: np.linalg.norm(g[:9], axis=(-2, -1)).max() for k, g in paused(M, N).items()}
        bounds = {k: max(bound, first[k] / (M * N) ** 0.5) for k, bound in bounds.items()}
    assert all(found[k] <= bound for k, bound in bounds.items()), found
    if case.longer is not None:
        alone, (longer, least) = root_mean_squares(case.alone), case.longer
        assert alone[longer] > least
        within = [k for k in alone if alone[k] <= case.bound]
        assert all(found[k] == alone[k] for k in within), (found, alone)
        assert "Shampoo" in name or "constant" in within
    if name == "SOAP":
        assert found["at every step"] < 0.3


def blocks(kind: str, m: int, n: int) -> np.ndarray:
    """Gradients with scales that vanish: of blocks, of heavy tails, or of a projected column."""
    random = np.random.default_rng(3)
    g = random.standard_normal((STEPS, m, n))
    if kind == "column":  # outside the leading three directions, but for 1e-4
        g[:, 3:], g[:, :3, 0], g[:, 3, 0] = 0, 1e-4 * g[:, :3, 0], 1
        return g
    g[:, : m // 2, n // 2 :] = 0
    if kind == "diagonal":
        g[:, m // 2 :, : n // 2] = 0
    return g if kind != "tails" else random.standard_t(1.2, (STEPS, m, n))


LITERAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # and what has no bound there
    "racs": ({"limit": INF}, ("diagonal", "tails")),
    "fira": ({"compensation": curvax.subspaces.fira(limit=INF)}, ("column",)),
    "apollo": ({"limit": INF}, ("tails",)),
}
VANISHING = ("diagonal", "triangular", "tails", "column")


@pytest.mark.parametrize("method", cells(LITERAL, of=2))
def test_scales_that_vanish_have_a_longest_update_and_the_paper_s_form_has_none(
    method: str,
) -> None:
    row, (literal, unbounded) = NAMED[method], LITERAL[method]
    given = np.stack([blocks(kind, 8, 12) for kind in VANISHING], axis=1).astype(np.float32)
    settings = {**row.settings, **({} if method == "racs" else {"eps": 1e-8})}

    def found(**more: Any) -> np.ndarray:
        run = jax.jit(trajectory(row.direction(**{**settings, **more})))
        return np.asarray(run(given, np.ones_like(given[0]))[0], np.float64)

    assert_bounded(row.longest, [*given], found())
    updates = found(**literal)
    for i, kind in enumerate(VANISHING):
        if kind in unbounded:
            with pytest.raises(AssertionError, match="bound"):
                assert_bounded(row.longest, [*given[:, i : i + 1]], updates[:, i : i + 1])


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    """The norm of a Gaussian gradient's first direction is that of the fixed point's scale."""
    g = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    for row, literal in (("racs", {"limit": INF}), ("apollo", {"rank": 64, "limit": INF})):
        make = NAMED[row].direction
        own, wide = (make(**{**literal, **x}) for x in ({"limit": 1.01 / 0.1}, {}))
        first, paper = (jax.jit(lambda g, t=t: t.update(g, t.init(g))[0])(g) for t in (own, wide))
        assert np.array_equal(first, paper)
