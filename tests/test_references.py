"""Trajectories against NumPy float64 transcriptions of the papers, direction and state.

Every case runs on a whole family of gradients at once (a batch of wide ones, tall, square, rank
deficient, one row, with a row and a column of zeros and steps without gradient), in float32 and in
float64. The gradients are exact in float32, so that what is compared is the work of the optimizer
alone. Bounds are `factor · condition · eps`, with the condition number of the method:

- Newton-Schulz: an iteration multiplies perturbations by at most `max |p'| = a`, so `condition`
  is the product of the first coefficients (485 for Muon's five steps);
- an exact polar factor: the ratio of the extreme singular values of the range;
- `(V + eps)^(-1/2) M`: with `E = O(machine eps · λ_max)` the error of `V`'s decomposition and `M`
  in the range of `V`, the error is at most `κ₊ · (λ_max / λ_min)^(1/2)`, where `κ₊` is the
  condition of `V + eps` on the range of `V` and `λ_min` belongs to the whole space;
- RACS adds and multiplies positive numbers: condition 1.

Where a condition number leaves less than a digit of float32, float64 alone is compared.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, run
from reference import asgo as reference_asgo
from reference import muon as reference_muon
from reference.racs import racs as reference_racs

import curvax

STEPS = 24


def _in_both_dtypes(cases: Iterable[str], in_float32: Iterable[str]) -> Any:
    """Parametrizes by case and dtype: all in float64, in float32 those that differ in numerics."""
    pairs = [*((case, "float64") for case in cases), *((case, "float32") for case in in_float32)]
    return pytest.mark.parametrize(("case", "dtype"), pairs)


def _gradients() -> dict[str, np.ndarray]:
    """Gradients `(STEPS, ..., m, n)`, exact in float32; their scales jump by powers of two."""
    generator = np.random.default_rng(0)
    jumps = 2.0 ** (np.arange(STEPS) * 7 % 5 - 2)

    def normal(*shape: int) -> np.ndarray:
        entries = generator.standard_normal((STEPS, *shape)).astype(np.float32)
        return entries.astype(np.float64) * jumps.reshape(-1, *[1] * len(shape))

    def integers(*shape: int) -> np.ndarray:
        return generator.integers(-4, 5, shape).astype(np.float64)

    holes = normal(6, 8)
    holes[:, 2, :], holes[:, :, 5] = 0, 0
    holes[3], holes[10] = 0, 0
    return {
        "wide": normal(2, 5, 9),
        "tall": normal(11, 6),
        "square": normal(6, 6),
        "row": normal(1, 7),
        "rank 3": integers(STEPS, 9, 3) @ integers(3, 7) / 64,  # one row space throughout
        "holes": holes,
    }


GRADIENTS = _gradients()


def _run(transformation, gradients: dict[str, np.ndarray], dtype: str):
    """Directions and states of every step, from the library."""
    steps = [
        {name: jnp.asarray(g[t], dtype) for name, g in gradients.items()} for t in range(STEPS)
    ]
    return run(transformation, steps, jax.tree.map(jnp.zeros_like, steps[0]))


def _expected(reference, gradient: np.ndarray, **arguments):
    """Directions and states of every step, from a transcription; batches matrix by matrix."""
    if gradient.ndim == 3:
        return reference(list(gradient), **arguments)
    runs = [reference(list(gradient[:, b]), **arguments) for b in range(gradient.shape[1])]
    directions = [np.stack(together) for together in zip(*(r[0] for r in runs), strict=True)]
    states = [
        {name: np.stack([state[name] for state in together]) for name in together[0]}
        for together in zip(*(r[1] for r in runs), strict=True)
    ]
    return directions, states


def _spread(values: np.ndarray) -> float:
    """The ratio of the largest to the smallest along the last axis, of those beyond rounding."""
    largest = values.max(axis=-1, keepdims=True)
    smallest = np.where(values > 1e-12 * largest, values, np.inf).min(axis=-1, keepdims=True)
    return float(np.max(np.where(largest > 0, largest / smallest, 1.0)))


def _resolution(dtype: str) -> float:
    return float(np.finfo(dtype).eps)


def _says_something(condition: float, dtype: str) -> bool:
    return 16 * condition * _resolution(dtype) < 0.1


# Muon


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
        {"coefficients": "classical", "steps": 7},
        {"coefficients": (2.0, -1.5, 0.5), "steps": 7},
    ),
    "polar_express": (
        {"coefficients": "polar_express", "steps": 6},
        {"coefficients": curvax.NEWTON_SCHULZ_COEFFICIENTS["polar_express"][:6]},
    ),
    "rows": ({"coefficients": ROWS, "steps": 4}, {"coefficients": (*ROWS, ROWS[-1])}),
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
        momenta, _ = _expected(reference_muon.muon, gradient, **inexact)
        return max(_spread(np.linalg.svd(m, compute_uv=False)) for m in momenta)
    rows = arguments.get("coefficients", reference_muon.COEFFICIENTS)
    rows = [rows] * arguments.get("steps", 5) if np.ndim(rows) == 1 else rows
    return float(np.prod([row[0] for row in rows]))


@_in_both_dtypes(MUON, ("defaults", "classical", "polar_express", "svd of a sum", "qdwh"))
def test_muon_follows_the_transcription(case, dtype):
    ours, theirs = MUON[case]
    full_rank = {n: g for n, g in GRADIENTS.items() if n not in ("rank 3", "holes")}
    gradients = full_rank if case == "qdwh" else GRADIENTS
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_muon(**ours), gradients, dtype)
        for name, gradient in gradients.items():
            desired, momenta = _expected(reference_muon.muon, gradient, **theirs)
            condition = _muon_condition(gradient, theirs)
            for t in range(STEPS):
                assert directions[t][name].dtype == dtype
                assert_close(directions[t][name], desired[t], condition=condition)
                assert_close(states[t][0].mu[name], momenta[t]["M"])
                assert states[t][0].count == t + 1


# RACS


RACS = {
    "defaults": {},
    "without averages": {"b2": 0.0},
    "one round": {"b2": 0.5, "iterations": 1},
    "seven rounds": {"b2": 0.6, "iterations": 7, "gamma": 1.2, "scale": 0.02},
    "no growth": {"gamma": 1.0, "iterations": 2},
}


def _racs(gradient: np.ndarray, arguments: dict[str, Any]):
    names = {"b2": "b", "scale": "alpha"}
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    return _expected(reference_racs, gradient, **renamed)


# Its state is float32 for parameters of any dtype: one case in float64 suffices.
@_in_both_dtypes(["defaults"], RACS)
def test_racs_follows_the_transcription(case, dtype):
    eps, factor = _resolution("float32"), 2 * STEPS
    gradients = {name: GRADIENTS[name] for name in ("wide", "tall", "row", "holes")}
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_racs(**RACS[case]), gradients, dtype)
        for name, gradient in gradients.items():
            desired, expected = _racs(gradient, RACS[case])
            for t in range(STEPS):
                scales, limiter, _ = states[t]
                assert directions[t][name].dtype == dtype
                assert_close(directions[t][name], desired[t], factor, eps=eps)
                assert_close(scales.rows[name], expected[t]["q"], factor, eps=eps)
                assert_close(scales.columns[name], expected[t]["s"], factor, eps=eps)
                assert_close(limiter.norm[name], expected[t]["phi"], factor, eps=eps)
                assert scales.count == t + 1


@pytest.mark.parametrize("case", ["defaults", "without averages"])
def test_the_racs_trajectories_meet_the_limiter_and_its_absence(case):
    for name in ("wide", "tall", "square"):
        norms = np.array([state["phi"] for state in _racs(GRADIENTS[name], RACS[case])[1]])
        limited = np.isclose(norms[1:], 1.01 * norms[:-1], rtol=1e-12)
        assert limited.any() and not limited.all(), name


# ASGO


ASGO = {
    "defaults": ({}, reference_asgo.asgo, {}),
    "period 3": ({"refresh": 3, "b2": 0.8}, reference_asgo.asgo, {"period": 3, "b2": 0.8}),
    "period 7 undamped": (
        {"refresh": 7, "eps": 0.0, "b1": 0.0},
        reference_asgo.asgo,
        {"period": 7, "eps": 0.0, "b1": 0.0},
    ),
    "left": (
        {"side": "left", "refresh": 3},
        reference_asgo.asgo,
        {"side": "left", "period": 3},
    ),
    "right": ({"side": "right"}, reference_asgo.asgo, {"side": "right"}),
    "undamped": ({"eps": 0.0, "b2": 0.5}, reference_asgo.asgo, {"eps": 0.0, "b2": 0.5}),
    "from momentum": (
        {"variant": "from_momentum"},
        reference_asgo.asgo_from_momentum,
        {},
    ),
    "from momentum, period 3, undamped": (
        {"variant": "from_momentum", "refresh": 3, "eps": 0.0},
        reference_asgo.asgo_from_momentum,
        {"period": 3, "eps": 0.0},
    ),
    "theoretical": ({"variant": "theoretical"}, reference_asgo.asgo_theoretical, {}),
    "theoretical, undamped": (
        {"variant": "theoretical", "eps": 0.0},
        reference_asgo.asgo_theoretical,
        {"eps": 0.0},
    ),
}


def _factor(state, name):
    """ASGO's only factor of a parameter."""
    left, right = state.left[name], state.right[name]
    assert (left is None) != (right is None)
    return left if right is None else right


def _asgo_conditions(states, arguments, theoretical: bool) -> tuple[float, float]:
    """The condition numbers of the direction and of the root, from the transcription's V."""
    eps = arguments.get("eps", 1e-6)
    of_direction, of_root = 1.0, 1.0
    for state in states:
        values = np.maximum(np.linalg.eigvalsh(state["V"]), 0)
        values = np.where(values > 1e-12 * values.max(axis=-1, keepdims=True), values, 0)
        # What is inverted and then rooted; damping outside the root is eps² inside.
        damped = (np.sqrt(values) + eps) ** 2 if theoretical else values + eps
        on_range = _spread(np.where(values > 0, damped, 0))
        whole = np.max(damped.max(axis=-1) / damped.min(axis=-1)) if eps > 0 else on_range
        of_direction = max(of_direction, on_range * np.sqrt(whole))
        of_root = max(of_root, float(whole))
    return of_direction, of_root


def _assert_asgo_matches(directions, states, case: str, names) -> int:
    """Compares all steps; returns how many parameters' directions could be compared."""
    _, reference, arguments = ASGO[case]
    theoretical = reference is reference_asgo.asgo_theoretical
    compared = 0
    for name in names:
        desired, expected = _expected(reference, GRADIENTS[name], **arguments)
        conditions = _asgo_conditions(expected, arguments, theoretical)
        dtype = directions[0][name].dtype.name
        direction_says, root_says = (_says_something(c, dtype) for c in conditions)
        compared += direction_says
        for t in range(STEPS):
            factor = _factor(states[t], name)
            assert_close(factor.statistic, expected[t]["V"])
            assert states[t].count == t + 1
            if not theoretical:
                assert_close(states[t].momentum.mu[name], expected[t]["M"])
            if direction_says:
                assert_close(directions[t][name], desired[t], condition=conditions[0])
            if root_says and theoretical:
                product = np.asarray(factor.root, np.float64) @ expected[t]["Lambda"]
                identity = _range_projector(expected[t]["V"], arguments.get("eps", 1e-6))
                eps = _resolution(dtype)
                assert_close(product, identity, condition=conditions[1], eps=eps)
            elif root_says:
                assert_close(factor.root, expected[t]["Lambda_inv"], condition=conditions[1])
    return compared


def _range_projector(v: np.ndarray, eps: float) -> np.ndarray:
    """The identity, or without damping the projector on the range of `v`."""
    values, vectors = np.linalg.eigh(v)
    keep = (values > 1e-12 * values.max(axis=-1, keepdims=True)) | (eps > 0)
    return (vectors * keep[..., None, :]) @ vectors.mT


@_in_both_dtypes(ASGO, ("defaults", "period 7 undamped", "from momentum", "theoretical"))
def test_asgo_follows_the_transcription(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_asgo(**ASGO[case][0]), GRADIENTS, dtype)
        assert all(d.dtype == dtype for d in directions[-1].values())
        compared = _assert_asgo_matches(directions, states, case, GRADIENTS)
    assert compared >= (3 if dtype == "float32" else len(GRADIENTS))


def test_asgo_refreshed_one_step_later_does_not_follow_the_transcription():
    late = curvax.scale_by_asgo(b2=0.8, refresh=curvax.every(3, offset=2))
    with jax.enable_x64(True):
        directions, states = _run(late, GRADIENTS, "float64")
        for name in GRADIENTS:
            with pytest.raises(AssertionError, match="exceeds the bound"):
                _assert_asgo_matches(directions, states, "period 3", [name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_head_wise_asgo_follows_the_transcription(dtype):
    heads, arguments = 3, {"b1": 0.8, "b2": 0.7}
    gradient = np.random.default_rng(1).standard_normal((STEPS, 4, 18)).astype(np.float32)
    axes = {"query": curvax.MatrixAxes(rows=0, columns=1, column_heads=heads)}
    direction = curvax.scale_by_asgo(refresh=3, **arguments)
    by_head = curvax.on_matrices(direction, weight_dimension_numbers=axes, stack=False)
    desired, expected = reference_asgo.asgo_headwise(list(gradient), heads, period=3, **arguments)
    of_direction, of_root = _asgo_conditions(expected, arguments, theoretical=False)
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(by_head, {"query": gradient}, dtype)
        for t in range(STEPS):
            factor = _factor(states[t].inner.inner, "query")
            assert_close(directions[t]["query"], desired[t], condition=of_direction)
            assert_close(states[t].inner.inner.momentum.mu["query"], expected[t]["M"])
            assert_close(factor.statistic, expected[t]["V"])
            assert_close(factor.root, expected[t]["Lambda_inv"], condition=of_root)
