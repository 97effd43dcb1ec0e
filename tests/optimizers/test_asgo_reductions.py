"""What ASGO and DASGO are in special cases, and what they commute with."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, share, stacked, steps_of
from tests.shared.identities import (
    STEPS,
    all_rotated,
    all_transposed,
    both,
    exact_muon,
    gradients_of,
    largest_condition,
    of_shapes,
    updates_of,
)

# A factory is compiled once for each of its static settings and shapes.
pytestmark = pytest.mark.xdist_group("ASGO reductions")


def _asgo(gradients: Any, variant: str = "practical", side: Any = None, **data: Any) -> Any:
    """Directions and states."""
    numbers = {"b1": 0.9, "b2": 0.95} if variant != "theoretical" else {}
    numbers |= {"eps": 1e-6, "period": 1}
    factory = curvax.scale_by_asgo
    return both(factory, gradients, {**numbers, **data}, variant=variant, side=side)


# ASGO and Muon


WELL_CONDITIONED = of_shapes(*share([(5, 9), (9, 5), (6, 6), (1, 7)], of=2))


def _from_momentum(gradients: Any, **setting: Any) -> Any:
    return _asgo(gradients, "from_momentum", **{"b2": 0.0, "eps": 0.0, **setting})


def _in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda g: g.astype(np.float64), tree)


def test_asgo_from_momentum_with_b2_0_eps_0_refresh_1_is_exact_muon_without_nesterov():
    with jax.enable_x64(True):
        gradients = _in_float64(WELL_CONDITIONED)
        (directions, states), expected = _from_momentum(gradients), exact_muon(gradients)
        for name in gradients:
            # V = M Mᵀ has the square of M's condition number, its inverse root M's.
            condition = largest_condition(states[name].momentum.mu) ** 2
            assert_close(list(directions[name]), list(expected[name]), condition=condition)


def test_the_relation_of_asgo_and_muon_holds_in_float32_for_well_conditioned_momenta():
    gradients = gradients_of(5, 20)
    directions, states = _from_momentum(gradients)
    condition = largest_condition(states.momentum.mu) ** 2
    assert_close(list(directions), list(exact_muon(gradients)), condition=condition)


@pytest.mark.parametrize("setting", [{"eps": 1e-6}, {"b2": 0.5}, {"period": 2}])
def test_asgo_from_momentum_is_not_muon_without_these_settings(setting):
    with jax.enable_x64(True):
        gradients = _in_float64(WELL_CONDITIONED)
        directions, _ = _from_momentum(gradients, **setting)
        expected = exact_muon(gradients)["(5, 9)"]
        with pytest.raises(AssertionError, match="exceeds the bound"):
            assert_close(list(directions["(5, 9)"]), list(expected), condition=1e4)


# Transposes and rotations


WIDE_AND_TALL = of_shapes((4, 9), (9, 4))


@pytest.mark.parametrize("variant", ["practical", "from_momentum"])
def test_transposing_a_non_square_gradient_transposes_the_direction_of_asgo(variant):
    plain, _ = _asgo(WIDE_AND_TALL, variant, period=2)
    transposed, _ = _asgo(all_transposed(WIDE_AND_TALL), variant, period=2)
    assert_close(steps_of(transposed), steps_of(all_transposed(plain)), condition=100.0)


def test_a_square_gradient_is_preconditioned_on_the_left_so_that_transposing_it_does_not():
    gradients = gradients_of(6, 6)
    plain, _ = _asgo(gradients)
    transposed, _ = _asgo(gradients.mT)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(list(transposed), list(plain.mT), condition=100.0)
    left, _ = _asgo(gradients, side="left")
    right, _ = _asgo(gradients.mT, side="right")
    assert_close(plain, left, 0.0)
    assert_close(list(plain), list(right.mT), condition=100.0)


@pytest.mark.parametrize("variant", ["practical", "from_momentum", "theoretical"])
def test_asgo_commutes_with_rotations(variant):
    # The left side of a tall gradient has rank 4 of 9 at first: the range decides without damping.
    cases: list[Any] = [(WIDE_AND_TALL, None)]
    if variant == "theoretical":
        sides = {"(4, 9)": "left", "(9, 4)": "right"}
        cases = [({name: WIDE_AND_TALL[name]}, side) for name, side in sides.items()]
    for gradients, side in cases:
        plain, _ = _asgo(gradients, variant, side)
        rotated, _ = _asgo(all_rotated(gradients), variant, side)
        assert_close(steps_of(rotated), steps_of(all_rotated(plain)), condition=100.0)


# Vectors


@pytest.mark.parametrize("method", [curvax.asgo, curvax.dasgo])
def test_a_vector_bias_or_scale_has_one_adaptive_number_as_in_adagrad_norm(method):
    b1, b2, eps = 0.8, 0.7, 1e-3
    shapes = {"vector": (5,), "dense/bias": (3,), "norm/scale": (2, 4), "temperature": ()}
    tree = {name: np.zeros(shape) for name, shape in shapes.items()}
    gradients = jax.tree.map(np.asarray, gradients_like(tree, STEPS, dtype="float32"))
    updates = steps_of(updates_of(method(1.0, b1=b1, b2=b2, eps=eps), stacked(gradients)))
    for name in shapes:
        m, v = np.zeros(shapes[name]), 0.0
        for t, gradient in enumerate(gradients):
            g = np.asarray(gradient[name], np.float64)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.sum(g**2)
            assert_close(updates[t][name], -m / np.sqrt(v + eps))


def test_theoretical_asgo_of_a_vector_is_adagrad_norm():
    tree, eps = {"vector": np.zeros(5)}, 0.1
    gradients = gradients_like(tree, STEPS, dtype="float32")
    optimizer = curvax.asgo(1.0, variant="theoretical", eps=eps)
    updates, total = steps_of(updates_of(optimizer, stacked(gradients))), 0.0
    for update, gradient in zip(updates, gradients, strict=True):
        g = np.asarray(gradient["vector"], np.float64)
        total += np.sum(g**2)
        assert_close(update["vector"], -g / (np.sqrt(total) + eps))


# DASGO


@pytest.mark.parametrize("side", ["left", "right"])
def test_dasgo_on_a_matrix_with_one_column_is_adam_without_bias_correction_its_epsilon_inside(side):
    """On the right side with one row, as every vector has."""
    b1, b2, eps = 0.8, 0.7, 1e-3
    shapes = {"line": (6, 1), "lines": (3, 5, 1)}
    if side == "right":
        shapes = {"line": (1, 6), "lines": (3, 1, 5), "vector": (5,), "scalar": ()}
    gradients = gradients_like({k: np.zeros(x) for k, x in shapes.items()}, STEPS, dtype="float32")
    gradients = [jax.tree.map(np.asarray, g) for g in gradients]
    axes = {"lines": curvax.MatrixAxes(-2, -1), "line": curvax.MatrixAxes(-2, -1)}
    dasgo = curvax.dasgo(1.0, b1=b1, b2=b2, eps=eps, side=side, weight_dimension_numbers=axes)
    updates = steps_of(updates_of(dasgo, stacked(gradients)))
    m, v = (jax.tree.map(np.zeros_like, gradients[0]) for _ in "mv")
    for update, gradient in zip(updates, gradients, strict=True):
        m = optax.tree.update_moment(gradient, m, b1, 1)
        v = optax.tree.update_moment(gradient, v, b2, 2)
        assert_close(update, jax.tree.map(lambda m, v: -m / np.sqrt(v + eps), m, v))
    outside = jax.tree.map(lambda m, v: -m / (np.sqrt(v) + eps), m, v)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(updates[-1], outside)
