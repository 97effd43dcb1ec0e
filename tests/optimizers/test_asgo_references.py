"""ASGO and DASGO against NumPy float64 transcriptions: directions, statistics, roots.

Rows of the paper's `W` are neurons; the library's matrices have them as columns. So the paper's
right side is the library's left one, and the transcription gets transposed gradients.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import ALL_CELLS, assert_close, share
from tests.reference import asgo as reference_asgo
from tests.shared.transcriptions import (
    GRADIENTS,
    LEAVES,
    PLACES,
    STEPS,
    expected_of,
    in_both_dtypes,
    leaves_of,
    machine_epsilon,
    names_in,
    of,
    program_of_step,
    says_something,
    spread,
    trajectory_of,
)


def transposed(reference):
    """A transcription of the paper, for the library's layout."""

    def run(gradients, **arguments):
        directions, states = reference([g.T for g in gradients], **arguments)
        states = [{name: x.T if name == "M" else x for name, x in s.items()} for s in states]
        return [d.T for d in directions], states

    return run


TRANSPOSED_ASGO = transposed(reference_asgo.asgo)
FROM_MOMENTUM = transposed(reference_asgo.asgo_from_momentum)
PRINTED_ASGO = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "period": 1}


# The arguments of the library alone, the transcription, and the numbers that both take.
ASGO: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "defaults": ({}, TRANSPOSED_ASGO, {}),
    "period 3": ({}, TRANSPOSED_ASGO, {"period": 3, "b2": 0.8}),
    "period 7 undamped": ({}, TRANSPOSED_ASGO, {"period": 7, "eps": 0.0, "b1": 0.0}),
    "left": (
        {"side": "left"},
        functools.partial(TRANSPOSED_ASGO, side="right"),
        {"period": 3},
    ),
    "right": ({"side": "right"}, functools.partial(TRANSPOSED_ASGO, side="left"), {}),
    "undamped": ({}, TRANSPOSED_ASGO, {"eps": 0.0, "b2": 0.5}),
    "from momentum": ({"variant": "from_momentum"}, FROM_MOMENTUM, {}),
    "from momentum, period 3, undamped": (
        {"variant": "from_momentum"},
        FROM_MOMENTUM,
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
    chosen = leaves_of(ASGO_PROGRAMS.index(settings), dtype)
    leaves = {name: LEAVES[name] for name in chosen}
    return trajectory_of(curvax.scale_by_asgo, leaves, dtype, data, **settings)


def _factor(states, leaf):
    """ASGO's only factor of a parameter."""
    left, right = states[leaf].left, states[leaf].right
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
        on_range = spread(np.where(values > 0, damped, 0))
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
        desired, expected = expected_of(reference, GRADIENTS[name], **arguments)
        conditions = _asgo_conditions(expected, arguments, theoretical)
        leaf, place = PLACES[name]
        assert np.array_equal(states[leaf].count, np.arange(1, STEPS + 1))
        factor, direction = _factor(states, leaf), directions[leaf][:, place]
        statistic, root = factor.statistic[:, place], factor.inverse_root[:, place]
        dtype = direction.dtype.name
        direction_says, root_says = (says_something(c, dtype) for c in conditions)
        compared += direction_says
        for t in range(STEPS):
            assert_close(statistic[t], expected[t]["V"])
            if not theoretical:
                assert_close(states[leaf].momentum.mu[t, place], expected[t]["M"])
            if direction_says:
                assert_close(direction[t], desired[t], condition=conditions[0])
            if root_says and theoretical:
                product = root[t].astype(np.float64) @ expected[t]["Lambda"]
                identity = _range_projector(expected[t]["V"], arguments.get("eps", 1e-6))
                eps = machine_epsilon(dtype)
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
def test_the_defaults_of_asgo_are_the_papers(variant):
    printed = {**PRINTED_ASGO, "refresh": curvax.every(PRINTED_ASGO["period"], offset=1)}
    names = ("eps", "refresh") if variant == "theoretical" else ("b1", "b2", "eps", "refresh")
    printed = {name: printed[name] for name in names}
    ours = program_of_step(curvax.scale_by_asgo(variant=variant))
    assert ours == program_of_step(curvax.scale_by_asgo(variant=variant, **printed))
    assert ours != program_of_step(
        curvax.scale_by_asgo(variant=variant, **{**printed, "eps": 1e-5})
    )


@in_both_dtypes(
    ASGO,
    ("defaults", "theoretical", *(("period 7 undamped", "from momentum") if ALL_CELLS else ())),
    lambda case: f"ASGO, {ASGO[case][0]}",
)
def test_asgo_follows_the_transcription(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        directions, states = _asgo(case, dtype)
        assert all(d.dtype == dtype for d in directions.values())
        names = names_in(directions)
        compared = _assert_asgo_matches(directions, states, case, names)
        assert compared >= len(names) / (2 if dtype == "float32" else 1)


@pytest.mark.xdist_group("ASGO, {}, float64")
def test_asgo_refreshed_one_step_later_does_not_follow_the_transcription():
    with jax.enable_x64(True):
        directions, states = _asgo("period 3", "float64", offset=2)
        for name in GRADIENTS:
            with pytest.raises(AssertionError, match="exceeds the bound"):
                _assert_asgo_matches(directions, states, "period 3", [name])


@pytest.mark.parametrize("dtype", share(["float64", "float32"], of=2))
def test_head_wise_asgo_follows_the_transcription(dtype):
    heads, arguments = 3, {"b1": 0.8, "b2": 0.7}
    gradient = np.random.default_rng(1).standard_normal((STEPS, 4, 18)).astype(np.float32)
    axes = {"query": curvax.MatrixAxes(rows=0, columns=1, column_heads=heads)}
    direction = curvax.scale_by_asgo(refresh=3, **arguments)
    desired, expected = reference_asgo.asgo_headwise(list(gradient), heads, period=3, **arguments)
    of_direction, of_root = _asgo_conditions(expected, arguments, theoretical=False)
    with jax.enable_x64(dtype == "float64"):
        directions, states = trajectory_of(
            lambda: curvax.on_matrices(direction, weight_dimension_numbers=axes, stack=False),
            {"query": gradient},
            dtype,
        )
        own = states.inner["query"].inner
        factor = _factor({"query": own}, "query")
        for t in range(STEPS):
            assert_close(directions["query"][t], desired[t], condition=of_direction)
            assert_close(own.momentum.mu[t], expected[t]["M"])
            assert_close(factor.statistic[t], expected[t]["V"])
            assert_close(factor.inverse_root[t], expected[t]["Lambda_inv"], condition=of_root)


# DASGO


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_dasgo_follows_the_transcription(side, dtype):
    """No condition number: positive numbers are added and multiplied."""
    arguments = {} if side == "left" else {"b1": 0.0, "b2": 0.5, "eps": 0.0}
    ours = {**arguments, "side": side} if arguments else {}
    reference = reference_asgo.dasgo if side == "right" else transposed(reference_asgo.dasgo)
    with jax.enable_x64(dtype == "float64"):
        directions, states = trajectory_of(curvax.scale_by_dasgo, LEAVES, dtype, **ours)
        for name, gradient in GRADIENTS.items():
            desired, expected = expected_of(reference, gradient, **arguments)
            direction, diagonal = of(directions, name), of(states.diagonal, name)
            assert direction.dtype == dtype
            for t in range(STEPS):
                assert_close(direction[t], desired[t], STEPS)
                assert_close(diagonal[t], expected[t]["v"], STEPS)
