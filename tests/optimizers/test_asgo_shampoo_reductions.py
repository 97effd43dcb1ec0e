"""ASGO is one-sided Shampoo, policies at their limits, and DASGO is ASGO's diagonal."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.shared.kronecker import (
    AXES,
    ENDLESS,
    EPS,
    FOREVER,
    GRADIENTS,
    NEXT_TO_0,
    STEPS,
    WIDE,
    Trajectory,
    assert_different,
    assert_equal,
    assert_same,
    family,
    refreshes_of,
    run_shampoo,
    updates_of,
)

pytestmark = pytest.mark.xdist_group("Kronecker reductions")  # which share compiled programs


def _asgo(refresh: Any) -> optax.GradientTransformation:
    return curvax.scale_by_asgo(eps=EPS, refresh=refresh)


ASGO_BY_PERIOD = family(lambda period: _asgo(curvax.every(period, offset=1)), WIDE)
ASGO_BY_THRESHOLD = {
    "foam": family(lambda threshold: _asgo(curvax.policies.foam(2, threshold, 1.0)), WIDE),
    "diagonal_residual": family(
        lambda threshold: _asgo(curvax.policies.diagonal_residual(2, threshold)), WIDE
    ),
}


def test_asgo_with_foam_and_an_infinite_threshold_is_asgo_refreshed_once():
    directions, states = ASGO_BY_THRESHOLD["foam"](ENDLESS)
    assert_same(directions, ASGO_BY_PERIOD(FOREVER)[0])
    assert_different(directions, ASGO_BY_PERIOD(2)[0])
    assert set(refreshes_of(states)[-1]) == {1}


@pytest.mark.parametrize("policy", ASGO_BY_THRESHOLD)
def test_asgo_with_a_threshold_next_to_0_is_asgo_refreshed_at_every_check(policy):
    directions, states = ASGO_BY_THRESHOLD[policy](NEXT_TO_0)
    assert_same(directions, ASGO_BY_PERIOD(2)[0])
    assert set(refreshes_of(states)[-1]) == {STEPS // 2}


@functools.cache
def _one_sided_asgos(side: str) -> Trajectory:
    def make(value: Any) -> optax.GradientTransformation:
        refresh = curvax.every(value["period"], offset=1)
        numbers = {name: value[name] for name in ("b1", "b2", "eps")}
        return curvax.scale_by_asgo(side=side, refresh=refresh, **numbers)

    return family(make)


def _one_sided_asgo(gradients: Any = GRADIENTS, side: str = "right", period: int = 2) -> Any:
    value = {"b1": 0.8, "b2": 0.9, "eps": EPS, "period": period}
    return _one_sided_asgos(side)(value, gradients)[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_asgo_is_shampoo_of_order_2_on_one_side(side):
    asgo = _one_sided_asgo(side=side)
    left, right = (run_shampoo(b1=0.8, side=x)[0] for x in ("left", "right"))
    shampoo, other = (left, right) if side == "left" else (right, left)
    assert_equal(asgo, shampoo)
    assert_different(asgo, other)


# DASGO


def test_on_matrices_with_more_rows_dasgo_is_not_adam():
    dasgo = curvax.dasgo(1.0, weight_dimension_numbers=AXES, b1=0.0, b2=0.9, eps=EPS)
    updates = updates_of(dasgo)
    rms = updates_of(optax.scale_by_rms(0.9, EPS))
    assert_different(updates, jax.tree.map(np.negative, rms))


@pytest.mark.parametrize("side", ["left", "right"])
def test_on_gradients_whose_lines_do_not_overlap_dasgo_is_one_sided_asgo(side):
    """Then `GGᵀ` or `GᵀG` is diagonal; DASGO does not see more of it."""
    dasgo = curvax.scale_by_dasgo(b1=0.8, b2=0.9, eps=EPS, side=side)

    def apart(x: np.ndarray) -> np.ndarray:
        rows, columns = (np.arange(n) for n in x.shape[-2:])
        lines = rows[:, None] % len(columns) == columns
        return x * (lines if side == "right" else rows[:, None] == columns % len(rows))

    gradients = jax.tree.map(apart, GRADIENTS)
    assert_same(updates_of(dasgo, gradients), _one_sided_asgo(gradients, side, period=1))
    assert_different(updates_of(dasgo), _one_sided_asgo(side=side, period=1))
