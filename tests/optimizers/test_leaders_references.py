"""NorMuon, starts of Newton-Schulz, Dion, Lars, cautious decay, hyperball and eigenvalue-corrected
Shampoo against NumPy float64 transcriptions, over 30 steps.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned, share
from tests.reference.cautious import cautious_weight_decay, hyperball
from tests.reference.dion import dion
from tests.reference.eigenvalue_corrected import eigenvalue_corrected
from tests.reference.lars import lars
from tests.reference.normuon import normuon
from tests.reference.polar_starts import TURBO_MUON, muon_from
from tests.shared.soap import growing_gradients, soap_gradients

SHAPES = {"wide": (6, 15), "square": (5, 5), "odd": (7, 11), "tall": (9, 6)}
SHAPES = dict(share(SHAPES.items(), of=3))
GRADIENTS = {name: soap_gradients(shape) for name, shape in SHAPES.items()}
STEPS = [dict(zip(SHAPES, step, strict=True)) for step in zip(*GRADIENTS.values(), strict=True)]
NEWTON_SCHULZ = 3.4445**5  # five iterations multiply small singular values by 3.4445

MUON: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "NorMuon as printed": (
        optax.chain(
            curvax.momentum(0.95),
            curvax.orthogonalize(),
            curvax.normalize_neurons(0.95, 1e-10, side="left"),
            curvax.normalize_matrices(0.2),
        ),
        normuon,
        {},
    ),
    "muon with b2": (
        curvax.scale_by_muon(b2=0.9),
        normuon,
        {
            "b2": 0.9,
            "eps": 1e-8,
            "scale": "norm",
            "neurons": "columns",
            "nesterov": True,
            "bias_correction": True,
        },
    ),
    "from AOL": (
        curvax.scale_by_muon(method=curvax.polar.newton_schulz(4, norm="aol")),
        muon_from,
        {"start": "aol", "steps": 4},
    ),
    "Turbo-Muon": (
        curvax.scale_by_muon(
            method=curvax.polar.newton_schulz(4, norm="aol", coefficients="turbo_muon")
        ),
        muon_from,
        {"start": "aol", "coefficients": TURBO_MUON},
    ),
    "from Schatten 4": (
        curvax.scale_by_muon(method=curvax.polar.newton_schulz(norm="gram")),
        muon_from,
        {"start": "schatten"},
    ),
    "on the Gram matrix": (
        curvax.scale_by_muon(method=curvax.polar.newton_schulz(coefficients="polar_express")),
        muon_from,
        {"gram": True, "coefficients": curvax.NEWTON_SCHULZ_COEFFICIENTS["polar_express"][:5]},
    ),
}


@pytest.mark.parametrize("case", share(MUON, of=2))
def test_variants_of_muon_follow_the_transcription(case):
    ours, transcription, settings = MUON[case]
    with jax.enable_x64(True):
        found, _ = run_scanned(ours, STEPS)
    # Our Newton-Schulz adds an ε of 1e-8 to the norm; the printed starts have none.
    eps = 1e-8 if transcription is muon_from else None
    for name in SHAPES:
        expected, _ = transcription(GRADIENTS[name], **settings)
        for d, e in zip(found, expected, strict=True):
            assert_close(d[name], e, condition=NEWTON_SCHULZ, eps=eps)


@pytest.mark.parametrize("side", ["left", "right"])
def test_dion_follows_the_transcription(side):
    direction = curvax.scale_by_dion(3, b1=0.9, side=side)
    with jax.enable_x64(True):
        first = direction.init(STEPS[0])
        found, states = run_scanned(direction, STEPS)
    for name in SHAPES:
        expected, kept = dion(
            GRADIENTS[name], first[name].factor, mu=0.9, scale=None, transposed=side == "right"
        )
        for t in range(len(STEPS)):
            assert_close(states[t][name].mu, kept[t]["M"], 64, condition=1e3)
            assert_close(found[t][name], expected[t], 64, condition=1e3)


def test_lars_follows_the_transcription():
    direction = optax.chain(curvax.momentum(0.9), curvax.scale_by_weight_norm(0.3))
    weights = {name: gradients[0] + 1 for name, gradients in GRADIENTS.items()}
    with jax.enable_x64(True):
        found, _ = run_scanned(direction, STEPS, weights)
    for name in SHAPES:
        # The driver keeps the parameters as they are, and so does the rate 0 here.
        expected, _ = lars(GRADIENTS[name], weights[name], phi=lambda z: 0.3 * z, at_zero="one")
        for d, e in zip(found, expected, strict=True):
            assert_close(d[name], e, 64)


def trained(optimizer: Any, weights: Any, steps: list[Any]) -> list[Any]:
    """The weights after each step, in one program."""

    @jax.jit
    def run(weights: Any, steps: Any) -> Any:
        def step(carry: Any, g: Any) -> Any:
            weights, state = carry
            updates, state = optimizer.update(g, state, weights)
            weights = optax.apply_updates(weights, updates)
            return (weights, state), weights

        return jax.lax.scan(step, (weights, optimizer.init(weights)), steps)[1]

    found = run(weights, jax.tree.map(lambda *x: np.stack(x), *steps))
    return [jax.tree.map(lambda x, t=t: np.asarray(x[t]), found) for t in range(len(steps))]


def test_cautious_decay_follows_the_transcription():
    optimizer = optax.chain(curvax.add_cautious_decay(0.5), optax.scale_by_learning_rate(0.1))
    weights = {name: gradients[-1] for name, gradients in GRADIENTS.items()}
    with jax.enable_x64(True):
        found = trained(optimizer, weights, STEPS)
    for name in SHAPES:
        _, states = cautious_weight_decay(
            GRADIENTS[name], weights[name], learning_rates=0.1, weight_decay=0.5
        )
        for w, state in zip(found, states, strict=True):
            assert_close(w[name], state["W"], 64)


def test_hyperball_follows_the_transcription():
    optimizer = optax.chain(
        curvax.scale_by_weight_norm(), optax.scale_by_learning_rate(0.1), curvax.keep_weight_norm()
    )
    weights = {name: gradients[-1] for name, gradients in GRADIENTS.items()}
    with jax.enable_x64(True):
        found = trained(optimizer, weights, STEPS)
    for name in SHAPES:
        _, states = hyperball(GRADIENTS[name], weights[name], learning_rates=0.1)
        for w, state in zip(found, states, strict=True):
            assert_close(w[name], state["W"], 64)


CORRECTED: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "b3": 0.9, "bias_correction": True}


def _graded() -> list[np.ndarray]:
    """Square gradients whose statistics keep the order of their eigenvalues.

    Ours sorts columns before each QR, as SOAP does, and the paper's code after the last one.
    """
    scale, turn = (
        2.0 ** -np.arange(5),
        np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0],
    )
    noise = np.random.default_rng(1).standard_normal((30, 5, 5))
    return [turn @ (scale[:, None] * (np.eye(5) + 0.05 * x)) @ turn for x in noise]


def _renewed_by_warm_qr(
    method: str, gradients: dict[str, list[np.ndarray]], sides: tuple[str, ...]
) -> Any:
    """Our directions, and by name the transcription's with its states.

    Bases are renewed where the criterion fails, by as many steps as it takes: on these sides in
    some steps and not in others.
    """
    tolerance = 0.005
    ours = curvax.scale_by_soap(
        **CORRECTED,
        eps=1e-8,
        method=curvax.eigenbases.qr(100) if method == "qr" else method,
        refresh=curvax.policies.diagonal_residual(1, tolerance),
        limit=float("inf"),
    )
    with jax.enable_x64(True):
        steps = zip(*gradients.values(), strict=True)
        found, states = run_scanned(ours, [dict(zip(gradients, g, strict=True)) for g in steps])
    transcribed = {}
    for name, own in gradients.items():
        expected, kept = transcribed[name] = eigenvalue_corrected(
            own,
            **CORRECTED,
            eps=1e-8,
            eps_inside=False,
            tolerance=tolerance,
            max_iterations=None,
            method=method,
            sort="descending",
            carry_v="permute" if method == "qr" else "keep",
        )
        assert len(expected) == len(found)
        for side in sides:
            renewed = [state[f"new_{side[0].upper()}"] for state in kept]
            assert 3 < sum(renewed) < len(renewed), (name, side)
            counts = [getattr(state[name], side).refreshes for state in states]
            assert np.diff([0, *counts]).tolist() == [int(x) for x in renewed], (name, side)
    return found, transcribed


@pytest.mark.parametrize("method", share(["qr", "eigh"], of=2))
def test_warm_qr_follows_the_transcription_in_all_shapes(method):
    gradients = {name: growing_gradients(shape) for name, shape in SHAPES.items()}
    found, transcribed = _renewed_by_warm_qr(method, gradients, ("left", "right"))
    for name, (expected, kept) in transcribed.items():
        for d, e, state in zip(found, expected, kept, strict=True):
            turned = max(_over_gap(state[side]) for side in "LR")
            assert_close(d[name], e, 64, condition=1e3 + turned)


def _over_gap(factor: np.ndarray) -> float:
    """`λ_max / gap`, by which rounding turns a basis; null spaces have unit vectors here."""
    values = np.linalg.eigvalsh(factor) / np.linalg.norm(factor, 2)
    gap = np.diff(values[values > 1e-12]).min(initial=1)
    assert gap > 1e-5
    return 1 / gap


@pytest.mark.parametrize("method", ["eigh", "qr"])
def test_soap_with_warm_qr_is_eigenvalue_corrected_shampoo(method):
    """From dense gradients, for which a renewal takes several steps of QR."""
    found, transcribed = _renewed_by_warm_qr(method, {"graded": _graded()}, ("left",))
    expected, kept = transcribed["graded"]
    if method == "qr":
        assert max(state["iterations_L"] for state in kept) > 1
    # In the first basis, which diagonalizes the first gradient, noise is divided by noise.
    for t in range(1, len(found)):
        assert_close(found[t]["graded"], expected[t], 64, condition=1e5)
