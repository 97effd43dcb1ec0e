"""Muon against its NumPy float64 transcription: direction and momentum at every step."""

import jax
import numpy as np

import curvax
from tests.helpers import assert_close
from tests.reference import muon as reference_muon
from tests.shared.transcriptions import (
    FULL_RANK,
    GRADIENTS,
    LEAVES,
    STEPS,
    expected_of,
    in_both_dtypes,
    leaves_of,
    names_in,
    of,
    spread,
    trajectory_of,
)

ROWS = ((3.4445, -4.7750, 2.0315), (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
MUON = {
    "defaults": ({}, {}),
    "ema without nesterov": ({"nesterov": False}, {"nesterov": False}),
    "sum with nesterov": ({"accumulate": "sum"}, {"momentum": "trace"}),
    "sum without nesterov": (
        {"accumulate": "sum", "nesterov": False, "b1": 0.8},
        {"momentum": "trace", "nesterov": False, "b1": 0.8},
    ),
    "classical": (
        {"method": curvax.polar.newton_schulz(7, coefficients="classical")},
        {"coefficients": (2.0, -1.5, 0.5), "steps": 7},
    ),
    "polar_express": (
        {"method": curvax.polar.newton_schulz(6, coefficients="polar_express")},
        {"coefficients": curvax.NEWTON_SCHULZ_COEFFICIENTS["polar_express"][:6]},
    ),
    "rows": (
        {"method": curvax.polar.newton_schulz(4, coefficients=ROWS)},
        {"coefficients": (*ROWS, ROWS[-1])},
    ),
    "svd": ({"method": "svd"}, {"exact": True}),
    "svd of a sum": (
        {"method": "svd", "accumulate": "sum", "nesterov": False, "b1": 0.5},
        {"exact": True, "momentum": "trace", "nesterov": False, "b1": 0.5},
    ),
    "qdwh": ({"method": "qdwh", "nesterov": False}, {"exact": True, "nesterov": False}),
}


def _muon_condition(gradient: np.ndarray, arguments) -> float:
    """How much of a relative error of the momentum the orthogonalization may pass on."""
    if arguments.get("exact"):
        # One iteration X <- X leaves the momentum itself, normalized.
        inexact = {**arguments, "exact": False, "coefficients": (1.0, 0.0, 0.0), "steps": 1}
        momenta, _ = expected_of(reference_muon.muon, gradient, **inexact)
        return max(spread(np.linalg.svd(m, compute_uv=False)) for m in momenta)
    rows = arguments.get("coefficients", reference_muon.COEFFICIENTS)
    rows = [rows] * arguments.get("steps", 5) if np.ndim(rows) == 1 else rows
    return float(np.prod([row[0] for row in rows]))


@in_both_dtypes(MUON, ("defaults", "classical", "polar_express", "svd of a sum", "qdwh"))
def test_muon_follows_the_transcription(case, dtype):
    ours, theirs = MUON[case]
    chosen = leaves_of(list(MUON).index(case), dtype)
    leaves = {name: (FULL_RANK if case == "qdwh" else LEAVES)[name] for name in chosen}
    with jax.enable_x64(dtype == "float64"):
        directions, states = trajectory_of(curvax.scale_by_muon, leaves, dtype, **ours)
        assert np.array_equal(states[0].count, np.arange(1, STEPS + 1))
        for name in names_in(leaves):
            if case == "qdwh" and name in ("rank 3", "holes"):
                continue
            gradient = GRADIENTS[name]
            desired, momenta = expected_of(reference_muon.muon, gradient, **theirs)
            condition = _muon_condition(gradient, theirs)
            direction, mu = of(directions, name), of(states[0].mu, name)
            assert direction.dtype == dtype
            for t in range(STEPS):
                assert_close(direction[t], desired[t], condition=condition)
                assert_close(mu[t], momenta[t]["M"])
