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

Gradients of one shape are one batch, and cases that differ in numbers alone run one program: decay
rates, damping, scales and periods are its data. A method's defaults run on all gradients; its other
programs on half of them each, in turns, or with CURVAX_ALL_CELLS on all. What the library takes
where nothing is said is compared with the papers' numbers program by program.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
from helpers import ALL_CELLS, assert_close, program
from reference import asgo as reference_asgo
from reference import muon as reference_muon
from reference.racs import racs as reference_racs

import curvax

STEPS = 24


def _in_both_dtypes(
    cases: Iterable[str], in_float32: Iterable[str], program_of: Callable[[str], Any] = str
) -> Any:
    """Parametrizes by case and dtype: all in float64, in float32 those that differ in numerics.

    Cases of one program run in one worker.
    """
    pairs = [*((case, "float64") for case in cases), *((case, "float32") for case in in_float32)]
    grouped = [
        pytest.param(*pair, marks=pytest.mark.xdist_group(f"{program_of(pair[0])}, {pair[1]}"))
        for pair in pairs
    ]
    return pytest.mark.parametrize(("case", "dtype"), grouped)


def _gradients() -> dict[str, np.ndarray]:
    """Gradients `(STEPS, ..., m, n)`, exact in float32; their scales jump by powers of two."""
    generator = np.random.default_rng(1)
    jumps = 2.0 ** (np.arange(STEPS) * 7 % 5 - 2)

    def normal(*shape: int) -> np.ndarray:
        entries = generator.standard_normal((STEPS, *shape)).astype(np.float32)
        return entries.astype(np.float64) * jumps.reshape(-1, *[1] * len(shape))

    def integers(*shape: int) -> np.ndarray:
        return generator.integers(-4, 5, shape).astype(np.float64)

    holes = normal(5, 9)
    holes[:, 2, :], holes[:, :, 5] = 0, 0
    holes[3], holes[10] = 0, 0
    return {
        "wide": normal(2, 5, 9),
        "tall": normal(11, 6),
        "square": normal(6, 6),
        "row": normal(1, 7),
        "rank 3": integers(STEPS, 11, 3) @ integers(3, 6) / 64,  # one row space throughout
        "holes": holes,
    }


GRADIENTS = _gradients()
# The library's leaves, and where in them the gradients are.
LEAVES = {
    "wide": np.concatenate([GRADIENTS["wide"], GRADIENTS["holes"][:, None]], axis=1),
    "tall": np.stack([GRADIENTS["tall"], GRADIENTS["rank 3"]], axis=1),
    "square": GRADIENTS["square"],
    "row": GRADIENTS["row"],
}
PLACES: dict[str, tuple[str, Any]] = {
    "wide": ("wide", slice(0, 2)),
    "tall": ("tall", 0),
    "square": ("square", ...),
    "row": ("row", ...),
    "rank 3": ("tall", 1),
    "holes": ("wide", 2),
}
FULL_RANK = {**LEAVES, "wide": LEAVES["wide"][:, :2], "tall": LEAVES["tall"][:, :1]}


HALVES = (("wide", "row"), ("tall", "square"))


def _leaves_of(place: int, dtype: str) -> tuple[str, ...]:
    """What a method's program of this place runs on: the other half in the other dtype."""
    return tuple(LEAVES) if ALL_CELLS or place == 0 else HALVES[(place + (dtype == "float32")) % 2]


def _names(leaves: Iterable[str]) -> list[str]:
    """The gradients that are in these leaves."""
    return [name for name, (leaf, _) in PLACES.items() if leaf in leaves]


def _of(tree: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What belongs to a gradient, in a tree of all steps like the leaves."""
    leaf, place = PLACES[name]
    return tree[leaf][:, place]


@functools.cache
def _compiled(factory: Callable[..., Any], settings: tuple[tuple[str, Any], ...]):
    """Directions and states of all steps, from gradients and the arguments that are data."""

    def trajectory(gradients: Any, data: dict[str, Any]) -> Any:
        arguments = {**dict(settings), **data}
        if "period" in data:
            period, offset = arguments.pop("period"), arguments.pop("offset")
            refresh = dataclasses.replace(curvax.every(period), offset=offset)
            arguments["refresh"] = refresh
        transformation = factory(**arguments)

        def step(state: Any, gradient: Any) -> Any:
            direction, state = transformation.update(gradient, state)
            return state, (direction, state)

        start = transformation.init(jax.tree.map(lambda g: g[0], gradients))
        return jax.lax.scan(step, start, gradients)[1]

    return jax.jit(trajectory)


def _run(factory, gradients: dict[str, np.ndarray], dtype: str, data=None, **settings: Any):
    """Directions and states of all steps, which come first, from the library."""
    given = {name: np.asarray(g, dtype) for name, g in gradients.items()}
    run = _compiled(factory, tuple(settings.items()))
    return jax.tree.map(np.asarray, run(given, data or {}))


def _program(transformation: Any) -> str:
    """What a step of a transformation computes."""
    g = np.zeros((2, 3), np.float32)
    return program(transformation.update, g, jax.eval_shape(transformation.init, g))


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
    chosen = _leaves_of(list(MUON).index(case), dtype)
    leaves = {name: (FULL_RANK if case == "qdwh" else LEAVES)[name] for name in chosen}
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(curvax.scale_by_muon, leaves, dtype, **ours)
        assert np.array_equal(states[0].count, np.arange(1, STEPS + 1))
        for name in _names(leaves):
            if case == "qdwh" and name in ("rank 3", "holes"):
                continue
            gradient = GRADIENTS[name]
            desired, momenta = _expected(reference_muon.muon, gradient, **theirs)
            condition = _muon_condition(gradient, theirs)
            direction, mu = _of(directions, name), _of(states[0].mu, name)
            assert direction.dtype == dtype
            for t in range(STEPS):
                assert_close(direction[t], desired[t], condition=condition)
                assert_close(mu[t], momenta[t]["M"])


# RACS


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
    return _expected(reference_racs, gradient, **renamed)


def test_what_racs_takes_where_nothing_is_said_is_the_papers():
    assert _program(curvax.scale_by_racs()) == _program(curvax.scale_by_racs(**PRINTED_RACS))
    other = curvax.scale_by_racs(**{**PRINTED_RACS, "gamma": 1.02})
    assert _program(curvax.scale_by_racs()) != _program(other)


# Its state is float32 for parameters of any dtype: one case in float64 suffices.
@_in_both_dtypes(["defaults"], RACS, lambda case: f"RACS, {RACS[case].get('iterations')}")
def test_racs_follows_the_transcription(case, dtype):
    eps, factor = _resolution("float32"), 2 * STEPS
    data = {**PRINTED_RACS, **RACS[case]}
    iterations = data.pop("iterations")
    place = 1 if dtype == "float64" else [5, 1, 7, 2].index(iterations)
    chosen = _leaves_of(place, dtype)
    leaves = {name: LEAVES[name] for name in chosen if name != "square"}
    with jax.enable_x64(dtype == "float64"):
        directions, (scales, limiter, _) = _run(
            curvax.scale_by_racs, leaves, dtype, data, iterations=iterations
        )
        assert np.array_equal(scales.count, np.arange(1, STEPS + 1))
        for name in _names(leaves):
            if name == "rank 3":
                continue
            desired, expected = _racs(GRADIENTS[name], RACS[case])
            direction = _of(directions, name)
            assert direction.dtype == dtype
            state = {"q": scales.rows, "s": scales.columns, "phi": limiter.norm}
            found = {key: _of(tree, name) for key, tree in state.items()}
            for t in range(STEPS):
                assert_close(direction[t], desired[t], factor, eps=eps)
                for key, x in found.items():
                    assert_close(x[t], expected[t][key], factor, eps=eps)


@pytest.mark.parametrize("case", ["defaults", "without averages"])
def test_the_racs_trajectories_meet_the_limiter_and_its_absence(case):
    for name in ("wide", "tall", "square"):
        norms = np.array([state["phi"] for state in _racs(GRADIENTS[name], RACS[case])[1]])
        limited = np.isclose(norms[1:], 1.01 * norms[:-1], rtol=1e-12)
        assert limited.any() and not limited.all(), name


# ASGO


PRINTED_ASGO = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "period": 1}
# The arguments of the library alone, the transcription, and the numbers that both take.
ASGO: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "defaults": ({}, reference_asgo.asgo, {}),
    "period 3": ({}, reference_asgo.asgo, {"period": 3, "b2": 0.8}),
    "period 7 undamped": ({}, reference_asgo.asgo, {"period": 7, "eps": 0.0, "b1": 0.0}),
    "left": (
        {"side": "left"},
        functools.partial(reference_asgo.asgo, side="left"),
        {"period": 3},
    ),
    "right": ({"side": "right"}, functools.partial(reference_asgo.asgo, side="right"), {}),
    "undamped": ({}, reference_asgo.asgo, {"eps": 0.0, "b2": 0.5}),
    "from momentum": ({"variant": "from_momentum"}, reference_asgo.asgo_from_momentum, {}),
    "from momentum, period 3, undamped": (
        {"variant": "from_momentum"},
        reference_asgo.asgo_from_momentum,
        {"period": 3, "eps": 0.0},
    ),
    "theoretical": ({"variant": "theoretical"}, reference_asgo.asgo_theoretical, {}),
    "theoretical, undamped": (
        {"variant": "theoretical"},
        reference_asgo.asgo_theoretical,
        {"eps": 0.0},
    ),
}


ASGO_PROGRAMS: list[dict[str, Any]] = [
    {},
    {"side": "left"},
    {"side": "right"},
    {"variant": "theoretical"},
    {"variant": "from_momentum"},
]


def _asgo(case: str, dtype: str, offset: int = 1):
    settings, reference, numbers = ASGO[case]
    data = {**PRINTED_ASGO, "offset": offset, **numbers}
    if reference is reference_asgo.asgo_theoretical:
        del data["b1"], data["b2"]
    chosen = _leaves_of(ASGO_PROGRAMS.index(settings), dtype)
    leaves = {name: LEAVES[name] for name in chosen}
    return _run(curvax.scale_by_asgo, leaves, dtype, data, **settings)


def _factor(states, leaf):
    """ASGO's only factor of a parameter."""
    left, right = states.left[leaf], states.right[leaf]
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
    assert np.array_equal(states.count, np.arange(1, STEPS + 1))
    for name in names:
        desired, expected = _expected(reference, GRADIENTS[name], **arguments)
        conditions = _asgo_conditions(expected, arguments, theoretical)
        leaf, place = PLACES[name]
        factor, direction = _factor(states, leaf), directions[leaf][:, place]
        statistic, root = factor.statistic[:, place], factor.inverse_root[:, place]
        dtype = direction.dtype.name
        direction_says, root_says = (_says_something(c, dtype) for c in conditions)
        compared += direction_says
        for t in range(STEPS):
            assert_close(statistic[t], expected[t]["V"])
            if not theoretical:
                assert_close(_of(states.momentum.mu, name)[t], expected[t]["M"])
            if direction_says:
                assert_close(direction[t], desired[t], condition=conditions[0])
            if root_says and theoretical:
                product = root[t].astype(np.float64) @ expected[t]["Lambda"]
                identity = _range_projector(expected[t]["V"], arguments.get("eps", 1e-6))
                eps = _resolution(dtype)
                assert_close(product, identity, condition=conditions[1], eps=eps)
            elif root_says:
                assert_close(root[t], expected[t]["Lambda_inv"], condition=conditions[1])
    return compared


def _range_projector(v: np.ndarray, eps: float) -> np.ndarray:
    """The identity, or without damping the projector on the range of `v`."""
    values, vectors = np.linalg.eigh(v)
    keep = (values > 1e-12 * values.max(axis=-1, keepdims=True)) | (eps > 0)
    return (vectors * keep[..., None, :]) @ vectors.mT


@pytest.mark.parametrize("variant", ["practical", "from_momentum", "theoretical"])
def test_what_asgo_takes_where_nothing_is_said_is_the_papers(variant):
    printed = {**PRINTED_ASGO, "refresh": curvax.every(PRINTED_ASGO["period"], offset=1)}
    names = ("eps", "refresh") if variant == "theoretical" else ("b1", "b2", "eps", "refresh")
    printed = {name: printed[name] for name in names}
    ours = _program(curvax.scale_by_asgo(variant=variant))
    assert ours == _program(curvax.scale_by_asgo(variant=variant, **printed))
    assert ours != _program(curvax.scale_by_asgo(variant=variant, **{**printed, "eps": 1e-5}))


@_in_both_dtypes(
    ASGO,
    ("defaults", "period 7 undamped", "from momentum", "theoretical"),
    lambda case: f"ASGO, {ASGO[case][0]}",
)
def test_asgo_follows_the_transcription(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        directions, states = _asgo(case, dtype)
        assert all(d.dtype == dtype for d in directions.values())
        names = _names(directions)
        compared = _assert_asgo_matches(directions, states, case, names)
        assert compared >= len(names) / (2 if dtype == "float32" else 1)


@pytest.mark.xdist_group("ASGO, {}, float64")
def test_asgo_refreshed_one_step_later_does_not_follow_the_transcription():
    with jax.enable_x64(True):
        directions, states = _asgo("period 3", "float64", offset=2)
        for name in GRADIENTS:
            with pytest.raises(AssertionError, match="exceeds the bound"):
                _assert_asgo_matches(directions, states, "period 3", [name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_head_wise_asgo_follows_the_transcription(dtype):
    heads, arguments = 3, {"b1": 0.8, "b2": 0.7}
    gradient = np.random.default_rng(1).standard_normal((STEPS, 4, 18)).astype(np.float32)
    axes = {"query": curvax.MatrixAxes(rows=0, columns=1, column_heads=heads)}
    direction = curvax.scale_by_asgo(refresh=3, **arguments)
    desired, expected = reference_asgo.asgo_headwise(list(gradient), heads, period=3, **arguments)
    of_direction, of_root = _asgo_conditions(expected, arguments, theoretical=False)
    with jax.enable_x64(dtype == "float64"):
        directions, states = _run(
            lambda: curvax.on_matrices(direction, weight_dimension_numbers=axes, stack=False),
            {"query": gradient},
            dtype,
        )
        states = states.inner.inner
        factor = _factor(states, "query")
        for t in range(STEPS):
            assert_close(directions["query"][t], desired[t], condition=of_direction)
            assert_close(states.momentum.mu["query"][t], expected[t]["M"])
            assert_close(factor.statistic[t], expected[t]["V"])
            assert_close(factor.inverse_root[t], expected[t]["Lambda_inv"], condition=of_root)
