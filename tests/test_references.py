"""Trajectories against NumPy float64 transcriptions of the papers, direction and state.

Every case runs on a whole family of gradients at once (wide, tall, square, odd sizes, rank
deficient, one row, one column, a batch, rows and columns of zeros, a first gradient of zero), in
float32 and in float64. The gradients are exact in float32, so that what is compared is the work of
the optimizer alone. Bounds are `factor · condition · eps`, with the condition number of the method:

- Newton-Schulz: an iteration multiplies perturbations by at most `max |p'| = a`, so `condition`
  is the product of the first coefficients (485 for Muon's five steps);
- an exact polar factor: the ratio of the extreme singular values of the range;
- `(V + eps)^(-1/2) M`: with `E = O(machine eps · λ_max)` the error of `V`'s decomposition and `M`
  in the range of `V`, the error is at most `κ₊ · (λ_max / λ_min)^(1/2)`, where `κ₊` is the
  condition of `V + eps` on the range of `V` and `λ_min` belongs to the whole space;
- RACS adds and multiplies positive numbers: condition 1.
"""

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
DTYPES = ("float32", "float64")


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
    idle = normal(3, 5)
    idle[0], idle[10] = 0, 0
    return {
        "wide": normal(5, 9),
        "tall": normal(11, 6),
        "square": normal(6, 6),
        "row": normal(1, 7),
        "column": normal(7, 1),
        "batch": normal(2, 4, 7),
        "rank 3": integers(STEPS, 9, 3) @ integers(3, 7) / 64,  # one row space throughout
        "holes": holes,
        "idle": idle,
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
    """The ratio of the largest to the smallest entry along the last axis that is not rounding."""
    noise = 1e-12 * values.max(axis=-1, keepdims=True)
    smallest = np.where(values > noise, values, np.inf).min(axis=-1)
    return float(np.max(np.where(np.isfinite(smallest), values.max(axis=-1) / smallest, 1.0)))


def _resolution(dtype: str) -> float:
    return float(np.finfo(dtype).eps)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MUON)
def test_muon_follows_the_transcription(case, dtype):
    ours, theirs = MUON[case]
    full_rank = {n: g for n, g in GRADIENTS.items() if n not in ("rank 3", "holes", "idle")}
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
    "one round": {"b2": 0.0, "iterations": 1},
    "twelve rounds, wide limit": {"b2": 0.6, "iterations": 12, "gamma": 1.2, "scale": 0.02},
    "limit 1": {"b2": 0.9, "gamma": 1.0},
    "no limit": {"b2": 0.5, "gamma": float("inf")},
}


def _racs(gradient: np.ndarray, arguments):
    names = {"b2": "b", "scale": "alpha"}
    return _expected(
        reference_racs, gradient, **{names.get(k, k): v for k, v in arguments.items()}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", RACS)
def test_racs_follows_the_transcription(case, dtype):
    # Its state is float32 for parameters of any dtype.
    eps, factor = _resolution("float32"), 2 * STEPS
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_racs(**RACS[case]), GRADIENTS, dtype)
        for name, gradient in GRADIENTS.items():
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
    gamma = 1.01
    for name in ("wide", "tall", "square"):
        norms = np.array([state["phi"] for state in _racs(GRADIENTS[name], RACS[case])[1]])
        limited = np.isclose(norms[1:] / norms[:-1], gamma, rtol=1e-12)
        assert 3 <= limited.sum() <= STEPS - 4, name


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
        largest = values.max(axis=-1, keepdims=True)
        on_range = values > 1e-12 * largest
        if theoretical:  # the damping stands outside the root: eps² is its size inside
            damped = (np.sqrt(np.where(on_range, values, 0)) + eps) ** 2
        else:
            damped = np.where(on_range, values, 0) + eps
        range_only = _spread(np.where(on_range, damped, 0))
        whole = range_only if eps == 0 else _spread(damped)
        of_direction = max(of_direction, range_only * np.sqrt(whole))
        of_root = max(of_root, whole)
    return of_direction, of_root


def _assert_asgo_matches(directions, states, case: str, names) -> None:
    _, reference, arguments = ASGO[case]
    theoretical = reference is reference_asgo.asgo_theoretical
    for name in names:
        desired, expected = _expected(reference, GRADIENTS[name], **arguments)
        of_direction, of_root = _asgo_conditions(expected, arguments, theoretical)
        for t in range(STEPS):
            factor = _factor(states[t], name)
            assert_close(directions[t][name], desired[t], condition=of_direction)
            assert_close(factor.statistic, expected[t]["V"])
            assert states[t].count == t + 1
            if theoretical:
                assert_close(
                    np.asarray(factor.root, np.float64) @ expected[t]["Lambda"],
                    _range_projector(expected[t]["V"], arguments.get("eps", 1e-6)),
                    condition=of_root,
                    eps=_resolution(factor.root.dtype.name),
                )
            else:
                assert_close(factor.root, expected[t]["Lambda_inv"], condition=of_root)
                assert_close(states[t].momentum.mu[name], expected[t]["M"])


def _range_projector(v: np.ndarray, eps: float) -> np.ndarray:
    """The identity, or without damping the projector on the range of `v`."""
    values, vectors = np.linalg.eigh(v)
    keep = (values > 1e-12 * values.max(axis=-1, keepdims=True)) | (eps > 0)
    return (vectors * keep[..., None, :]) @ vectors.mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ASGO)
def test_asgo_follows_the_transcription(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_asgo(**ASGO[case][0]), GRADIENTS, dtype)
        assert all(d.dtype == dtype for d in directions[-1].values())
        _assert_asgo_matches(directions, states, case, GRADIENTS)


def test_asgo_refreshed_one_step_later_does_not_follow_the_transcription():
    late = curvax.scale_by_asgo(b2=0.8, refresh=curvax.every(3, offset=2))
    directions, states = _run(late, GRADIENTS, "float32")
    for name in GRADIENTS:
        with pytest.raises(AssertionError, match="exceeds the bound"):
            _assert_asgo_matches(directions, states, "period 3", [name])


@pytest.mark.parametrize("dtype", DTYPES)
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
            factor = _factor(states[t].inner, "query")
            assert_close(directions[t]["query"], desired[t], condition=of_direction)
            assert_close(states[t].inner.momentum.mu["query"], expected[t]["M"])
            assert_close(factor.statistic, expected[t]["V"])
            assert_close(factor.root, expected[t]["Lambda_inv"], condition=of_root)
