"""RACS against its NumPy float64 transcription: direction, scales and limiter at every step."""

from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close
from tests.reference.racs import racs as reference_racs
from tests.shared.transcriptions import (
    GRADIENTS,
    LEAVES,
    STEPS,
    expected_of,
    in_both_dtypes,
    leaves_of,
    machine_epsilon,
    names_in,
    of,
    program_of_step,
    trajectory_of,
)

PRINTED_RACS = {"b2": 0.9, "gamma": 1.01, "scale": 0.05, "iterations": 5}
RACS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "without averages": {"b2": 0.0},
    "one round": {"b2": 0.5, "iterations": 1},
    "seven rounds": {"b2": 0.6, "iterations": 7, "gamma": 1.2, "scale": 0.02},
    "no growth": {"gamma": 1.0, "iterations": 2},
}


def _racs(gradient: np.ndarray, arguments: dict[str, Any]):
    names = {"b2": "b", "scale": "alpha"}
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    return expected_of(reference_racs, gradient, **renamed)


def test_the_defaults_of_racs_are_the_papers():
    assert program_of_step(curvax.scale_by_racs()) == program_of_step(
        curvax.scale_by_racs(**PRINTED_RACS)
    )
    other = curvax.scale_by_racs(**{**PRINTED_RACS, "gamma": 1.02})
    assert program_of_step(curvax.scale_by_racs()) != program_of_step(other)


# Its state is float32 for parameters of any dtype: one case in float64 suffices.
@in_both_dtypes(["defaults"], RACS, lambda case: f"RACS, {RACS[case].get('iterations')}")
def test_racs_follows_the_transcription(case, dtype):
    eps, factor = machine_epsilon("float32"), 2 * STEPS
    data = {**PRINTED_RACS, **RACS[case]}
    iterations = data.pop("iterations")
    place = 1 if dtype == "float64" else [5, 1, 7, 2].index(iterations)
    chosen = leaves_of(place, dtype)
    leaves = {name: LEAVES[name] for name in chosen if name != "square"}
    with jax.enable_x64(dtype == "float64"):
        directions, (scales, limiter, _) = trajectory_of(
            curvax.scale_by_racs, leaves, dtype, data, iterations=iterations
        )
        assert np.array_equal(scales.count, np.arange(1, STEPS + 1))
        for name in names_in(leaves):
            if name == "rank 3":
                continue
            desired, expected = _racs(GRADIENTS[name], RACS[case])
            direction = of(directions, name)
            assert direction.dtype == dtype
            state = {"q": scales.rows, "s": scales.columns, "phi": limiter.norm}
            found = {key: of(tree, name) for key, tree in state.items()}
            for t in range(STEPS):
                assert_close(direction[t], desired[t], factor, eps=eps)
                for key, x in found.items():
                    assert_close(x[t], expected[t][key], factor, eps=eps)


@pytest.mark.parametrize("case", ["defaults", "without averages"])
def test_the_racs_trajectories_are_limited_at_some_steps_and_not_at_others(case):
    for name in ("wide", "tall", "square"):
        norms = np.array([state["phi"] for state in _racs(GRADIENTS[name], RACS[case])[1]])
        limited = np.isclose(norms[1:], 1.01 * norms[:-1], rtol=1e-12)
        assert limited.any() and not limited.all(), name
