"""Rounding does not become direction: what float32 cannot know is not divided by.

Gradients of low rank, as float32 rounds them: the direction stays in their row and column spaces,
and hardly turns if the gradient is multiplied by 1 + 1e-7. And how far every method's updates turn
with gradients that are rounded differently, which docs/distribution.md states.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg._inverse_root import (
    DIRECTION_NOISE,
    inverse_root_by_eigh,
    root_eigenvalues,
    rounding_floor,
)
from tests.cells import cells
from tests.helpers import trajectory
from tests.reference.foam import foam

SHAPES = [(24, 16), (65, 64), (128, 48)]
RANKS = (1, 4)
SMALL = {"eps": 1e-9, "refresh": 1, "statistics_every": 1}
METHODS: dict[str, Any] = {
    "foam": curvax.scale_by_foam,
    "foam by rotations": functools.partial(curvax.scale_by_foam, method="rotations"),
    "dr_shampoo": curvax.scale_by_dr_shampoo,
    "shampoo": functools.partial(curvax.scale_by_shampoo, **SMALL),
    "shampoo by Newton": functools.partial(
        curvax.scale_by_shampoo, method="coupled_newton", **SMALL
    ),
    "shampoo of p = 2 by Newton-Schulz": functools.partial(
        curvax.scale_by_shampoo, method="newton_schulz", root=2, **SMALL
    ),
    "shampoo by products": functools.partial(curvax.scale_by_shampoo, method="products", **SMALL),
    "asgo": curvax.scale_by_asgo,
    "asgo by rotations": functools.partial(curvax.scale_by_asgo, method="rotations"),
    "asgo, damped outside": functools.partial(curvax.scale_by_asgo, variant="theoretical"),
    "soap": curvax.scale_by_soap,
    "galore": functools.partial(curvax.scale_by_galore, rank=8),
    "fira": functools.partial(curvax.scale_by_fira, rank=8),
}
ON_ONE_SIDE = ("galore", "fira")  # Adam's signs mix the other side
CASES = [(method, SHAPES[0]) for method in cells(METHODS, of=14)]
CASES += cells(METHODS, SHAPES[1:], of=26)


def of_rank(rank: int, m: int, n: int) -> np.ndarray:
    random = np.random.default_rng(rank)
    return random.standard_normal((m, rank)) @ random.standard_normal((rank, n))


def first_directions(make: Any, gradients: np.ndarray) -> np.ndarray:
    t, g = make(), jnp.asarray(gradients, jnp.float32)
    return np.asarray(jax.jit(lambda g: t.update(g, t.init(g), g)[0])(g), np.float64)


@pytest.mark.parametrize(("method", "shape"), CASES, ids=str)
def test_directions_of_gradients_of_low_rank_are_their_own(method, shape) -> None:
    gradients = np.stack([of_rank(rank, *shape) for rank in RANKS])
    found = first_directions(METHODS[method], np.stack([gradients, gradients * (1 + 1e-7)]))
    for rank, g, d, other in zip(RANKS, gradients, *found, strict=True):
        u, _, v = np.linalg.svd(g)
        u, v = u[:, :rank], v[:rank].T
        inside = d @ v @ v.T
        if method not in ON_ONE_SIDE:  # which project tall matrices on the right
            inside = u @ (u.T @ inside)
        length, outside = np.linalg.norm(d), np.linalg.norm(d - inside)
        assert outside <= 2 * DIRECTION_NOISE * length
        assert np.linalg.norm(d - other) <= 2 * DIRECTION_NOISE * length


@pytest.mark.parametrize("shape", cells([(128, 48), (24, 16)], of=2), ids=str)
def test_no_damping_makes_a_direction_of_noise(shape) -> None:
    """From far below the rounding of the largest eigenvalue to far above it."""

    @jax.jit
    def first(g, eps):
        t = curvax.scale_by_foam(eps=eps, max_damping=2 * eps)
        return t.update(g, t.init(g), g)[0]

    g = of_rank(1, *shape)
    u, s, v = np.linalg.svd(g)
    for damping in (0.01, 1.0, 5.0, 9.0, 32.0, 200.0):
        eps = damping * 2.0**-23 * 0.005 * s[0] ** 2
        d = np.float64(first(jnp.asarray(g, jnp.float32), eps))
        assert 1 - abs(u[:, 0] @ d @ v[0]) / np.linalg.norm(d) <= DIRECTION_NOISE**2 / 2


def test_a_float32_root_without_the_floor_is_all_noise() -> None:
    """The negative control: FOAM's damping alone, 1e-9 beside a largest eigenvalue of about 1."""
    g = of_rank(1, 24, 16).astype(np.float32)
    g /= np.linalg.norm(g)

    @jax.jit
    def root(a: jax.Array, floored: bool) -> jax.Array:
        floor = jnp.where(floored, rounding_floor(a, 2, 2), 0.0)
        return inverse_root_by_eigh(a, 2, 1e-9, floor=floor)[0]

    def outside(floored: bool) -> float:
        roots = [np.float64(root(a, floored)) for a in (g @ g.T, g.T @ g)]
        d, (u, _, v) = roots[0] @ g @ roots[1], np.linalg.svd(np.float64(g))
        return 1 - abs(u[:, 0] @ d @ v[0]) / float(np.linalg.norm(d))

    assert outside(False) > 0.9 and outside(True) < DIRECTION_NOISE


def test_foam_in_float32_is_foam_where_eigenvalues_are_resolved() -> None:
    """Also a stale root that meets new directions, as in the first period of a wide matrix: from a
    damping of 12 times the rounding of the largest eigenvalue on, directions are within 0.02."""
    steps, shape, random = 32, (17, 53), np.random.default_rng(0)
    full = random.standard_normal((steps, *shape))
    paused = full * np.where(abs(np.arange(steps) - 12) < 6, 1e-3, 1)[:, None, None]
    low = random.standard_normal((steps, 17, 4)) @ random.standard_normal((steps, 4, 53))
    settings = {"threshold": 0.75, "check_every": 5, "root": 2, "b2": 0.95}

    @jax.jit
    def ours(gradients, eps):
        t = curvax.scale_by_foam(eps=eps, max_damping=300 * eps, graft=None, **settings)
        return trajectory(t)(gradients)[0]

    def theirs(gradients, eps):
        return foam(list(gradients), base_damping=eps, max_damping=300 * eps, **settings)

    streams = []
    for g in (full, paused, low):
        largest = max(np.linalg.norm(state["L"], 2) for state in theirs(g, 1.0)[1])
        streams.append(np.float32(g / largest**0.5))
    gradients = np.stack(streams, axis=1)
    for damping in (12, 100, 1e4):
        eps = damping * float(jnp.finfo(jnp.float32).eps)
        found = np.float64(ours(gradients, eps))
        for i, g in enumerate(np.float64(streams)):
            exact = np.stack(theirs(g, eps)[0])
            length, error = (np.linalg.norm(x, axis=(1, 2)) for x in (exact, found[:, i] - exact))
            assert (error <= 0.02 * length).all()


@pytest.mark.parametrize("mode", ["absolute", "relative", "floor", "outside"])
@pytest.mark.parametrize(("root", "sides"), [(4, 2), (2, 2), (2, 1), (1, 1)])
def test_the_floor_changes_only_what_is_below_it(root: int, sides: int, mode: str) -> None:
    with jax.enable_x64(True):
        d = jnp.concatenate([jnp.zeros(3), 3.0 * 10.0 ** -jnp.arange(9.0)[::-1]])
        for dtype, damping in (("float64", 1e-3), ("float32", 1e-9)):
            floor = float(rounding_floor(jnp.eye(len(d), dtype=dtype), root, sides))
            with_floor, without = (
                np.asarray(root_eigenvalues(d.astype(dtype), root, damping, mode, x))
                for x in (floor, 0.0)
            )
            noise = np.asarray(d <= 3 * 8 * jnp.finfo(dtype).eps) & (dtype == "float32")
            least = np.minimum(without, np.float32((3 * floor) ** (-1 / root)))
            np.testing.assert_array_equal(with_floor, np.where(noise, least, without))
            assert (dtype == "float64") == bool((with_floor == without).all())


# What docs/distribution.md says of gradients that are rounded differently: how far the first update
# turns, later ones, and those for gradients of low rank.
TURNED = {
    ("racs", "dasgo", "apollo"): (1e-6, 1e-6, 1e-6),
    ("muon", "swan", "osgdm"): (1e-5, 2e-4, 2e-4),
    ("asgo", "shampoo", "foam", "dr_shampoo"): (2e-3, 2e-3, 0.03),
    ("soap",): (0.5, 0.02, 1.5),
    ("eigen_adam", "galore", "fira", "alice", "sumo"): (0.05, 1e-3, 0.01),
}
BOUNDS = {name: bounds for names, bounds in TURNED.items() for name in names}
SETTINGS = {
    **{name: {"rank": 8, "refresh": 10} for name in ("galore", "fira", "apollo", "sumo")},
    "alice": {"rank": 8, "switching": curvax.subspaces.complement(3), "refresh": 10},
    "shampoo": {"refresh": 10, "statistics_every": 1},
}


@pytest.mark.parametrize("name", cells(BOUNDS, of=17))
def test_updates_turn_no_further_than_stated(name: str) -> None:
    steps, order, seeds = 30, 64, 4
    random = np.random.default_rng(0)
    full = random.standard_normal((steps, seeds, order, order))
    left, right = (random.standard_normal((steps if i else 1, seeds, order, 4)) for i in range(2))
    gradients = np.concatenate([full, left @ np.swapaxes(right, -1, -2)], axis=1)
    rounded = gradients * (1 + 1e-7 * random.choice([-1, 1], gradients.shape))
    run = jax.jit(trajectory(getattr(curvax, f"scale_by_{name}")(**SETTINGS.get(name, {}))))
    a, b = (np.float64(run(jnp.asarray(g, jnp.float32))[0]) for g in (gradients, rounded))
    length, difference = (np.linalg.norm(x, axis=(-2, -1)) for x in (a, a - b))
    turn = difference / np.where(length > 0, length, 1)
    first, later, low = turn[0, :seeds].max(), turn[1:, :seeds].max(), turn[:, seeds:].max()
    for found, most in zip((first, later, low), BOUNDS[name], strict=True):
        assert found <= most
