"""Updates keep the bounds that the rows of the registry state, whatever comes and goes.

A matrix may get no gradient for many steps (an expert without tokens), one at every fifth step, the
same gradient for ever, or one that changes its sign; in 32 bits and with every storage.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.directions._moment_ratio import largest_ratio
from tests.cells import cells
from tests.helpers import trajectory
from tests.registry import NAMED, REGISTRY, Row
from tests.registry._bounds import assert_bounded, of_moments

STEPS = 60


def cases(m: int, n: int) -> dict[str, np.ndarray]:
    """Gradients `(STEPS, m, n)`."""
    random = np.random.default_rng(0)
    time = np.arange(STEPS)[:, None, None]

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    def at_some(steps: np.ndarray) -> np.ndarray:
        return np.where(steps, normal(STEPS, m, n), 0)

    one = normal(m, n)
    found = {
        "at every step": at_some(time >= 0),
        "at every fifth step": at_some(time % 5 == 0),
        "at every fifth step from the fifth": at_some(time % 5 == 4),
        "30 zeros first": at_some(time >= 30),
        "30 zeros later": at_some((time < 15) | (time >= 45)),
        "G, -G": np.where(time % 2, -one, one),
        "constant": np.where(time >= 0, one, 0),
        "rank 1": normal(STEPS, m, 1) * normal(STEPS, 1, n),
    }
    return {name: g.astype(np.float32) for name, g in found.items()}


@functools.cache
def gradients(m: int, n: int) -> np.ndarray:
    """All cases as one batch `(STEPS, case, m, n)`."""
    return np.stack(list(cases(m, n).values()), axis=1)


def directions(transformation: Any, m: int, n: int) -> np.ndarray:
    given = jnp.asarray(gradients(m, n))
    found, _ = jax.jit(trajectory(transformation))(given, jnp.ones_like(given[0]))
    return np.asarray(found, np.float64)


def root_mean_squares(transformation: Any, m: int, n: int) -> dict[str, float]:
    """The largest of every case."""
    found = np.sqrt(np.mean(directions(transformation, m, n) ** 2, axis=(-2, -1))).max(axis=0)
    return dict(zip(cases(m, n), map(float, found), strict=True))


STORAGES = {
    "32 bits": None,
    "4 bits": curvax.quantized(min_elements=1),
    "Cholesky": curvax.cholesky(min_elements=1, error_feedback=0.95),
}


@pytest.mark.parametrize("row", cells(REGISTRY, of=6))
def test_lengths_are_within_the_row_s_bound(row: Row) -> None:
    assert_within_the_bound(row)


@pytest.mark.parametrize(
    ("row", "storage"),
    cells([row for row in REGISTRY if row.factors], list(STORAGES)[1:], of=14),
)
def test_lengths_with_4_bits_are_within_the_row_s_bound(row: Row, storage: str) -> None:
    assert_within_the_bound(row, storage=STORAGES[storage])


def assert_within_the_bound(row: Row, **given: Any) -> None:
    found = directions(row.direction(**row.settings, **given), 8, 12)
    assert_bounded(row.longest or row.longest_repeated, [*gradients(8, 12)], found)


def test_soap_keeps_adam_s_bound_and_the_ratio_alone_does_not() -> None:
    limited = root_mean_squares(curvax.scale_by_soap(refresh=10), 32, 64)
    assert max(limited.values()) <= 1.001
    alone = root_mean_squares(curvax.scale_by_soap(refresh=10, limit=np.inf), 32, 64)
    assert alone["at every fifth step"] > 3  # Adam's bound is 1
    assert limited["at every step"] == alone["at every step"] < 0.3


@pytest.mark.parametrize("storage", cells(["4 bits", "Cholesky"], of=2))
def test_soap_in_4_bits_keeps_adam_s_bound_and_the_ratio_alone_does_not(storage: str) -> None:
    """Codes of a statistic in its basis do not turn the eigenvectors of a constant gradient."""
    found = root_mean_squares(curvax.scale_by_soap(storage=STORAGES[storage]), 32, 64)
    assert max(found.values()) <= 1.001
    alone = root_mean_squares(
        curvax.scale_by_soap(storage=STORAGES["4 bits"], limit=np.inf), 32, 64
    )
    assert alone["at every fifth step"] > 1.05
    assert alone["constant"] <= 1.001


@pytest.mark.parametrize(("method", "storage"), cells(["asgo", "shampoo"], STORAGES, of=6))
def test_stale_roots_with_a_limit_are_as_long_as_fresh_ones(method: str, storage: str) -> None:
    """Shampoo's direction is the gradient until the first refresh after a gradient."""
    m, n = 32, 64
    make, settings = {
        "asgo": (curvax.scale_by_asgo, ({"limit": True}, {})),
        "shampoo": (
            functools.partial(curvax.scale_by_shampoo, statistics_every=1),
            ({"graft": "limit"}, {"graft": None}),
        ),
    }[method]
    limited, alone = (
        root_mean_squares(make(refresh=10, storage=STORAGES[storage], **own), m, n)
        for own in settings
    )
    bound = 1.001 * (min(m, n) / 0.05 / (m * n)) ** 0.5
    for name, length in limited.items():
        first = np.linalg.norm(cases(m, n)[name][:9], axis=(-2, -1)).max() / (m * n) ** 0.5
        assert length <= max(bound, first * (method == "shampoo")), name
    if method == "shampoo":
        assert limited["30 zeros first"] < 0.6 and alone["30 zeros first"] > 2000
    elif storage == "32 bits":
        assert limited["rank 1"] < 0.6 and alone["rank 1"] > 10


def test_fresh_roots_of_asgo_keep_the_bound_of_its_docstring() -> None:
    m, n = 32, 64
    found = root_mean_squares(curvax.scale_by_asgo(), m, n)
    assert max(found.values()) <= 1.001 * float(largest_ratio(0.9, 0.95)) * n**-0.5


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.95, 0.95), (0.9, 0.95), (0.5, 0.3)])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_largest_ratio_is_attained(b1: float, b2: float, corrected: bool) -> None:
    """By gradients `(b1 / b2)^age`, which make the Cauchy-Schwarz inequality an equality."""
    most, steps = float(largest_ratio(b1, b2)), 4_000 if b2 > 0.99 else 400
    age = np.arange(steps)
    m, v = (1 - b1) * np.sum((b1**2 / b2) ** age), (1 - b2) * np.sum((b1**2 / b2) ** age)
    assert abs(m / np.sqrt(v) / most - 1) < 1e-6
    bounds = [of_moments(b1, b2, t, corrected) for t in (1, 2, 5, 20, 100, steps)]
    assert bounds == sorted(bounds) or np.allclose(bounds, most, rtol=1e-9)
    assert bounds[-1] <= (1 + 1e-9) * most


def test_moments_without_memory_of_squares_have_no_bound() -> None:
    assert largest_ratio(0.9, 0.81) == largest_ratio(0.5, 0.0) == np.inf
    assert np.isclose(largest_ratio(0.0, 0.9), 0.1**-0.5)
    traced = jax.jit(largest_ratio)(0.9, 0.999)
    assert np.isclose(traced, largest_ratio(0.9, 0.999), rtol=1e-5)


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


LITERAL: dict[str, dict[str, Any]] = {
    "racs": {"limit": np.inf},
    "fira": {"compensation": curvax.subspaces.fira(limit=np.inf)},
    "apollo": {"limit": np.inf},
}


@pytest.mark.parametrize(
    ("row", "kind"), cells(LITERAL, ["diagonal", "triangular", "tails", "column"], of=3)
)
def test_scales_that_vanish_have_a_longest_update_and_the_paper_s_form_has_none(
    row: str, kind: str
) -> None:
    given = blocks(kind, 8, 12).astype(np.float32)[:, None]
    method = NAMED[row]
    settings = {**method.settings, "eps": 1e-8} if row != "racs" else method.settings

    def found(**more: Any) -> np.ndarray:
        transformation = method.direction(**{**settings, **more})
        run = jax.jit(trajectory(transformation))
        return np.asarray(run(jnp.asarray(given), jnp.ones_like(given[0]))[0], np.float64)

    assert_bounded(method.longest, [*given], found())
    if kind in {"racs": ("diagonal", "tails"), "fira": ("column",), "apollo": ("tails",)}[row]:
        with pytest.raises(AssertionError, match="bound"):
            assert_bounded(method.longest, [*given], found(**LITERAL[row]))


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    """The norm of a Gaussian gradient's first direction is that of the fixed point's scale."""
    g = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    for row, literal in (("racs", {"limit": np.inf}), ("apollo", {"rank": 64, "limit": np.inf})):
        make = NAMED[row].direction
        own, wide = (make(**{**literal, **x}) for x in ({"limit": 1.01 / 0.1}, {}))
        first, paper = (jax.jit(lambda g, t=t: t.update(g, t.init(g))[0])(g) for t in (own, wide))
        assert np.array_equal(first, paper)
