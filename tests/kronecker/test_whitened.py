"""Statistics of whitened gradients: symmetries, bounds, combinations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.kronecker._whitened import inverse_roots
from tests.cells import cells
from tests.helpers import assert_close, scanned
from tests.shared.factors import statistic_of
from tests.shared.soap import soap_gradients, soap_trajectory

STEPS = 12
WIDE = soap_gradients((6, 9))[:STEPS]
SQUARE = soap_gradients((5, 5))[:STEPS]
STORED = curvax.quantized(bits=8, block=4, min_elements=1)


def roots(momentum: Any = None, refresh: Any = None, eps: float = 0.0, **settings: Any) -> Any:
    refresh = curvax.every(1) if refresh is None else refresh
    return curvax.precondition(
        momentum, refresh=refresh, root=2, b2=0.9, eps=eps, statistics="kl", **settings
    )


DIRECTIONS = {
    "kl_shampoo": curvax.scale_by_kl_shampoo(refresh=4, limit=float("inf")),
    "soap": curvax.scale_by_soap(refresh=4, statistics="kl"),
    "roots": roots(refresh=curvax.every(4)),
}
some_directions = pytest.mark.parametrize("name", cells(DIRECTIONS, of=3))


@some_directions
def test_scaling_the_gradients_does_not_change_the_direction_of_kl_shampoo(name):
    with jax.enable_x64(True):
        plain, _ = soap_trajectory(DIRECTIONS[name], SQUARE)
        scaled, _ = soap_trajectory(DIRECTIONS[name], [1e-3 * g for g in SQUARE])
    # In the first basis, which diagonalizes the first gradient, SOAP divides noise by noise.
    condition = float(np.linalg.cond(SQUARE[0])) ** 4
    assert_close(scaled[1:], plain[1:], 64, condition=condition)


@pytest.mark.parametrize("name", ["kl_shampoo", "roots"])
def test_a_pause_leaves_statistics_and_lengths_as_they_were(name: str) -> None:
    """A thousand decays of both sides would make the first statistics after them 1e45 too large."""
    zeros = [np.zeros((5, 5))] * 1000
    with jax.enable_x64(True):
        found, states = soap_trajectory(DIRECTIONS[name], [*SQUARE, *zeros, *SQUARE])
    for factor in (states.left, states.right):
        statistic = statistic_of(factor)
        assert_close(statistic[-STEPS - 1], statistic[STEPS - 1], 64)
        assert not np.allclose(statistic[STEPS - 2], statistic[STEPS - 1], rtol=1e-3)
    after, before = (np.linalg.norm(found[i]) for i in (-1, STEPS - 1))
    assert 0.1 * before < after < 10 * before


def test_after_one_step_kl_shampoo_is_precondition_with_whitened_statistics():
    eigen = curvax.scale_by_kl_shampoo(b1=0.0, b2=0.9)
    with jax.enable_x64(True):
        found, states = soap_trajectory(eigen, SQUARE[:2])
        expected, others = soap_trajectory(roots(), SQUARE[:2])
    condition = float(np.linalg.cond(SQUARE[0])) ** 2
    assert_close(found[0], expected[0], 64, condition=condition)
    # The statistics of the second step are whitened by those of the first.
    own, (first, second) = statistic_of(states.right), statistic_of(others.right)[:2]
    assert_close(own[1], second, 64, condition=condition)
    plain = 0.9 * first + 0.1 / 5 * SQUARE[1].T @ SQUARE[1]
    assert np.abs(plain - second).max() > 0.1 * np.abs(plain).max()


def test_directions_from_fresh_roots_keep_their_bound():
    """Of gradients of very different lengths, and of rank one."""
    generator = np.random.default_rng(1)
    sizes = 10.0 ** generator.integers(-3, 3, 30)
    gradients = [s * generator.standard_normal((6, 9)) for s in sizes]
    gradients[10:15] = [np.outer(g[:, 0], g[0]) for g in gradients[10:15]]
    with jax.enable_x64(True):
        found, _ = soap_trajectory(roots(eps=1e-12), gradients)
        stale, _ = soap_trajectory(roots(refresh=curvax.every(7), limit=True), gradients)
    longest = np.linalg.norm(found, axis=(1, 2))
    assert longest.max() <= 6 / np.sqrt(0.9 * 0.1)
    assert longest.max() > 6  # the bound says something
    assert np.linalg.norm(stale, axis=(1, 2)).max() <= 6 / np.sqrt(0.9 * 0.1) * (1 + 1e-9)


COMBINED = {
    "foam": roots(curvax.momentum(0.9), refresh=curvax.policies.foam(2), eps=1e-9, storage=STORED),
    "residual": curvax.scale_by_kl_shampoo(
        refresh=curvax.policies.diagonal_residual(2), storage=STORED
    ),
    "left": roots(side="left"),
}


@pytest.mark.parametrize("name", cells(COMBINED, of=3))
def test_policies_and_storages_combine_with_whitened_statistics(name):
    """Also with zeros first; the direction is close to 1 in root mean square."""
    zero = np.zeros((6, 9))
    found, _ = soap_trajectory(COMBINED[name], [zero, zero, *WIDE], "float32")
    assert np.isfinite(found).all() and not found[:2].any()
    lengths = np.sqrt(np.mean(found[2:] ** 2, axis=(1, 2)))
    assert (lengths > 0).all() and lengths.max() < 4


def test_noise_among_the_eigenvalues_whitens_nothing():
    d = jnp.array([[4.0, 1.0, 1e-14], [0.0, 0.0, 0.0], [jnp.nan, 1.0, 1.0]])
    found = inverse_roots(d)
    assert found[:2].tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert jnp.isnan(found[2]).all()


def test_the_limit_is_infinite_without_memory() -> None:
    settings: Any = {"statistics": "kl", "root": 2, "refresh": 1, "b2": 0.0}
    g = np.ones((1, 4, 3), np.float32)
    limited, plain = (
        scanned(curvax.scale_by_shampoo(graft=graft, **settings))(g)[0] for graft in ("limit", None)
    )
    assert np.isfinite(limited).all() and np.array_equal(limited, plain)
