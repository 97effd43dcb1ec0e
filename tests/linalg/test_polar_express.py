"""Coefficients by number of steps: Polar Express and DeepSeek-V4's against the transcription."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close
from tests.reference.muon import newton_schulz
from tests.reference.polar_express import composition, deepseek_v4, polar_express_for


def composed(rows: Any, lower: float = 1e-3) -> np.ndarray:
    """What the iterations make of singular values from `lower` to 1."""
    x = np.geomspace(lower, 1, 2000)
    for a, b, c in rows:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("steps", [1, 3, 5, 9])
def test_rows_equal_the_transcription(steps: int) -> None:
    """Late rows come from an interval whose width cancels: they differ, but not in their effect."""
    for settings, theirs in (
        ({}, polar_express_for(steps)),
        ({"cushion": 0.1, "safety": 1.0}, composition(steps, cushion=0.1)),
        ({"lower": 0.05}, polar_express_for(steps, lower=0.05)),
    ):
        ours, lower = curvax.polar_express(steps, **settings), settings.get("lower", 1e-3)
        assert np.shape(ours) == (steps, 3)
        assert_close(np.array(ours)[:4], np.array(theirs)[:4], 1, eps=1e-9)
        assert_close(composed(ours, lower), composed(theirs, lower), 1, eps=1e-9)


def test_rows_for_a_number_of_steps_are_the_best_of_so_many() -> None:
    def distance(rows: Any) -> float:
        return float(np.abs(composed(rows) - 1).max())

    express = functools.partial(curvax.polar_express, safety=1.0, cushion=0.0)
    found = [distance(express(steps)) for steps in (3, 4, 5, 6)]
    assert sorted(found, reverse=True) == found and found[-1] < 0.1 < found[0]
    for name in ("classical", "quintic", "polar_express"):
        rows = curvax.NEWTON_SCHULZ_COEFFICIENTS[name]
        assert distance((rows * 6 if len(rows) == 1 else rows)[:6]) > found[-1]


@pytest.mark.parametrize("steps", [6, 10, 12])
def test_deepseek_v4_takes_eight_steps_and_two(steps: int) -> None:
    method = curvax.polar.newton_schulz(steps, coefficients="deepseek_v4", eps=0.0)
    with jax.enable_x64(True):
        for shape in ((6, 9), (9, 4)):
            x = np.random.default_rng(0).standard_normal(shape)
            expected = newton_schulz(x, deepseek_v4(steps), eps=0.0)
            assert_close(jax.jit(method.factor)(x), expected, condition=3.4445**8)
