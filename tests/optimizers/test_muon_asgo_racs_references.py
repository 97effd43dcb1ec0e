"""Muon, ASGO, DASGO and RACS against NumPy float64 transcriptions, on hard gradients.

Conditions:

- Newton-Schulz: an iteration multiplies perturbations by at most `max |p'| = a`, so it is the
  product of the first coefficients (485 for Muon's five steps);
- an exact polar factor: the ratio of the extreme singular values of the range;
- `(V + eps)^(-1/2) M`: with `E = O(machine eps · λ_max)` the error of `V`'s decomposition and `M`
  in the range of `V`, the error is at most `κ₊ · (λ_max / λ_min)^(1/2)`, where `κ₊` is the
  condition of `V + eps` on the range of `V` and `λ_min` belongs to the whole space;
- ASGO's `V` and `M` are kept in a basis, and compared in the gradient's coordinates. A refresh
  turns them: beside the sum of a step there are three more products, each with its rounding: 4;
- RACS and DASGO add and multiply positive numbers: 1.

Rows of ASGO's `W` are neurons; the library's matrices have them as columns. So the paper's right
side is the library's left one, and the transcription gets transposed gradients.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.reference import asgo as asgo_reference
from tests.reference import muon as muon_reference
from tests.reference.racs import racs
from tests.shared.factors import root_of, statistic_of
from tests.shared.transcriptions import (
    FULL_RANK,
    HARD,
    Case,
    assert_follows,
    machine_epsilon,
    spread,
)

CASES: dict[str, Case] = {}
IN_FLOAT32: dict[str, int] = {}  # and how many of the matrices say something there

# Muon

newton_schulz = curvax.polar.newton_schulz
EXPRESS = curvax.NEWTON_SCHULZ_COEFFICIENTS["polar_express"][:6]
ROWS = ((3.4445, -4.7750, 2.0315), (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
SUM: dict[str, Any] = {"accumulate": "sum", "nesterov": False}
TRACE: dict[str, Any] = {"momentum": "trace", "nesterov": False}
MUON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "sum with nesterov": ({"accumulate": "sum"}, {"momentum": "trace"}),
    "classical": (
        {"method": newton_schulz(7, coefficients="classical")},
        {"coefficients": (2.0, -1.5, 0.5), "steps": 7},
    ),
    "polar_express": (
        {"method": newton_schulz(6, coefficients="polar_express")},
        {"coefficients": EXPRESS},
    ),
    "rows": ({"method": newton_schulz(4, coefficients=ROWS)}, {"coefficients": (*ROWS, ROWS[-1])}),
    "svd of a sum": ({"method": "svd", **SUM, "b1": 0.5}, {"exact": True, **TRACE, "b1": 0.5}),
    "qdwh": ({"method": "qdwh", "nesterov": False}, {"exact": True, "nesterov": False}),
}


def of_muon(arguments: dict[str, Any], gradients: list[np.ndarray], states: Any) -> float:
    """How much of a relative error of the momentum the orthogonalization may pass on."""
    if arguments.get("exact"):
        # One iteration X <- X leaves the momentum itself, normalized.
        inexact = {**arguments, "exact": False, "coefficients": (1.0, 0.0, 0.0), "steps": 1}
        momenta, _ = muon_reference.muon(gradients, **inexact)
        return max(spread(np.linalg.svd(m, compute_uv=False)) for m in momenta)
    rows = arguments.get("coefficients", muon_reference.COEFFICIENTS)
    rows = [rows] * arguments.get("steps", 5) if np.ndim(rows) == 1 else rows
    return float(np.prod([row[0] for row in rows]))


for name, (ours, theirs) in MUON.items():
    CASES[f"Muon, {name}"] = Case(
        curvax.scale_by_muon(**ours),
        functools.partial(muon_reference.muon, **theirs),
        FULL_RANK if name == "qdwh" else HARD,
        functools.partial(of_muon, theirs),
        {"mu": ("M", 1.0)},
        state_of=lambda states, name: SimpleNamespace(mu=states[0].mu[name]),
    )
IN_FLOAT32 |= {f"Muon, {x}": 6 for x in ("defaults", "classical", "polar_express", "svd of a sum")}
IN_FLOAT32["Muon, qdwh"] = 4

# ASGO and DASGO


def transposed(reference: Any, **arguments: Any) -> Any:
    """A transcription of the paper, for the library's layout."""

    def run(gradients: list[np.ndarray]) -> Any:
        found, states = reference([g.T for g in gradients], **arguments)
        states = [{name: x.T if name == "M" else x for name, x in s.items()} for s in states]
        return [d.T for d in found], states

    return run


THEORETICAL = {"variant": "theoretical"}
FROM_MOMENTUM = {"variant": "from_momentum"}
ASGO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, and numbers that both take
    "defaults": ({}, {}),
    "left, period 3": ({"side": "left"}, {"period": 3, "b2": 0.8}),
    "right, period 7, undamped": ({"side": "right"}, {"period": 7, "eps": 0.0, "b1": 0.0}),
    "from momentum": (FROM_MOMENTUM, {}),
    "from momentum, period 3, undamped": (FROM_MOMENTUM, {"period": 3, "eps": 0.0}),
    "theoretical": (THEORETICAL, {}),
    "theoretical, undamped": (THEORETICAL, {"eps": 0.0}),
}
OTHER_SIDE = {"left": "right", "right": "left"}
TURNED = 4.0


def of_asgo(eps: float, theoretical: bool, root: bool, gradients: Any, states: Any) -> float:
    """The condition number of the direction, or of the root, from the transcription's V."""
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
    return of_root if root else of_direction


def with_factor(eps: float, states: Any, name: str) -> Any:
    """The state with its only factor, in the gradient's coordinates."""
    own = states[name]
    (factor,) = filter(None, (own.left, own.right))
    momentum = getattr(own.momentum, "mu", None)
    if momentum is not None:
        momentum = np.asarray(momentum, np.float64)
        u = np.asarray(factor.basis, np.float64)
        momentum = u @ momentum if own.left else momentum @ np.swapaxes(u, -1, -2)
    return SimpleNamespace(V=statistic_of(factor), root=root_of(factor, 2, eps), mu=momentum)


def asgo_of(ours: dict[str, Any], numbers: dict[str, Any]) -> Case:
    names = {"period": "refresh"}
    given = {names.get(name, name): x for name, x in numbers.items()}
    if "refresh" in given:
        given["refresh"] = curvax.every(given["refresh"], offset=1)
    variant, theoretical = ours.get("variant"), ours.get("variant") == "theoretical"
    eps = numbers.get("eps", 1e-6)
    conditions = functools.partial(of_asgo, eps, theoretical)
    states = {"V": ("V", TURNED)}
    if theoretical:
        theirs = functools.partial(asgo_reference.asgo_theoretical, **numbers)
    else:
        name = "asgo" if variant is None else "asgo_from_momentum"
        side = {"side": OTHER_SIDE[ours["side"]]} if "side" in ours else {}
        theirs = transposed(getattr(asgo_reference, name), **numbers, **side)
        of_root = functools.partial(conditions, True)
        states |= {"mu": ("M", TURNED), "root": ("Lambda_inv", of_root)}
    direction = curvax.scale_by_asgo(**ours, **given)
    of_direction = functools.partial(conditions, False)
    state_of = functools.partial(with_factor, eps)
    return Case(direction, theirs, HARD, of_direction, states, state_of=state_of)


CASES |= {f"ASGO, {name}": asgo_of(*both) for name, both in ASGO.items()}
IN_FLOAT32 |= {"ASGO, defaults": 3, "ASGO, theoretical": 2, "ASGO, from momentum": 3}
HEADS: dict[str, Any] = {"b1": 0.8, "b2": 0.7}
CASES["ASGO, head-wise"] = Case(
    curvax.on_matrices(
        curvax.scale_by_asgo(refresh=3, **HEADS),
        weight_dimension_numbers={"query": curvax.MatrixAxes(0, 1, column_heads=3)},
        stack=False,
    ),
    lambda g: asgo_reference.asgo_headwise(g, 3, period=3, **HEADS),
    {"query": np.random.default_rng(1).standard_normal((24, 4, 18)).astype(np.float32)},
    functools.partial(of_asgo, 1e-6, False, False),
    {
        "V": ("V", TURNED),
        "mu": ("M", TURNED),
        "root": ("Lambda_inv", functools.partial(of_asgo, 1e-6, False, True)),
    },
    state_of=lambda states, name: with_factor(1e-6, {name: states.inner[name].inner}, name),
)
IN_FLOAT32["ASGO, head-wise"] = 1
for side, numbers in (("left", {}), ("right", {"b1": 0.0, "b2": 0.5, "eps": 0.0})):
    name, reference = f"DASGO on the {side}", asgo_reference.dasgo
    CASES[name] = Case(
        curvax.scale_by_dasgo(side=side, **numbers),
        transposed(reference) if side == "left" else functools.partial(reference, **numbers),
        HARD,
        states={"diagonal": ("v", 1.0)},
        factor=24.0,
    )
    IN_FLOAT32[name] = 6

# RACS, whose state is float32 for parameters of any dtype: one case in float64 suffices

RACS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "without averages": {"b2": 0.0},
    "seven rounds": {"b2": 0.6, "iterations": 7, "gamma": 1.2, "scale": 0.02},
    "no growth, one round": {"b2": 0.5, "gamma": 1.0, "iterations": 1},
}
POSITIVE = {"wide": HARD["wide"], "tall": HARD["tall"][:, 0], "row": HARD["row"]}


def racs_of(arguments: dict[str, Any]) -> Any:
    names = {"b2": "b", "scale": "alpha"}
    return functools.partial(racs, **{names.get(name, name): x for name, x in arguments.items()})


for name, numbers in RACS.items():
    CASES[f"RACS, {name}"] = Case(
        curvax.scale_by_racs(**numbers, limit=np.inf),
        racs_of(numbers),
        POSITIVE,
        states={"rows": ("q", 1.0), "columns": ("s", 1.0), "norm": ("phi", 1.0)},
        factor=48.0,
        eps=machine_epsilon("float32"),
        state_of=lambda states, name: SimpleNamespace(
            rows=states[0][name].rows, columns=states[0][name].columns, norm=states[1][name].norm
        ),
    )
    IN_FLOAT32[f"RACS, {name}"] = 4

CELLS = [(name, "float64") for name in CASES if "RACS, " not in name or name.endswith("defaults")]
CELLS += [(name, "float32") for name in IN_FLOAT32]


@pytest.mark.parametrize(("name", "dtype"), cells(CELLS, of=20))
def test_directions_follow_the_transcription(name: str, dtype: str) -> None:
    least = IN_FLOAT32[name] if dtype == "float32" else None
    assert_follows(CASES[name]._replace(dtype=dtype), least)


@pytest.mark.parametrize("case", ["defaults", "without averages"])
def test_the_racs_trajectories_are_limited_at_some_steps_and_not_at_others(case: str) -> None:
    for name, gradients in FULL_RANK.items():
        if name != "row":
            _, states = racs_of(RACS[case])(list(gradients))
            norms = np.array([state["phi"] for state in states])
            limited = np.isclose(norms[1:], 1.01 * norms[:-1], rtol=1e-12)
            assert limited.any() and not limited.all(), name
