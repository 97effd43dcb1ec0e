"""MuonClip (Muon with QK-clip), SOAP before Muon and one-sided Shampoo against transcriptions."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, run_scanned, share
from tests.reference.one_sided_shampoo import one_sided_shampoo
from tests.reference.qk_clip import largest_logits, muon_clip
from tests.reference.soap_muon import soap_muon
from tests.shared.soap import STEPS, growing_gradients, soap_gradients

NEWTON_SCHULZ = 3.4445**5  # five iterations multiply small singular values by 3.4445
WIDTH, HEADS, TIME, TAU = 6, 3, 4, 1.5
PLAIN = {"qc": (WIDTH, HEADS, 4), "kc": (WIDTH, HEADS, 4)}
LATENT = {**PLAIN, "qr": (WIDTH, HEADS, 2), "kr": (WIDTH, 2)}
POWERS = {"qr": 1.0, "*": 0.5}


@pytest.mark.parametrize(("shapes", "power"), [(PLAIN, 0.5), (LATENT, POWERS)], ids=["MHA", "MLA"])
def test_muon_with_clipped_logits_is_muon_clip(shapes: Any, power: Any) -> None:
    generator = np.random.default_rng(0)

    def drawn(number: int) -> list[dict[str, np.ndarray]]:
        return [{k: generator.standard_normal(s) for k, s in shapes.items()} for _ in range(number)]

    (first,), gradients = drawn(1), drawn(STEPS)
    batches = [generator.standard_normal((2, TIME, WIDTH)) / 2 for _ in range(STEPS)]
    axes = {name: curvax.MatrixAxes(0, tuple(range(1, len(s)))) for name, s in shapes.items()}
    with jax.enable_x64(True):
        optimizer = optax.chain(
            curvax.muon(
                0.1,
                nesterov=False,
                accumulate="sum",
                consistent_rms=0.2,
                weight_decay=0.1,
                matrices="all",
                weight_dimension_numbers=axes,
            ),
            curvax.clip_logits(TAU, power=power),
        )

        @jax.jit
        def step(weights: Any, state: Any, g: Any, largest: Any) -> Any:
            told = {name: largest[:, None] for name in shapes if name != "kr"}
            updates, state = optimizer.update(g, state, weights, max_logits=told)
            return optax.apply_updates(weights, updates), state

        weights, state, found = first, optimizer.init(first), []
        for g, x in zip(gradients, batches, strict=True):
            weights, state = step(weights, state, g, largest_logits(jax.device_get(weights), x))
            found.append(jax.device_get(weights))
    expected, logits = muon_clip(gradients, batches, first, learning_rate=0.1, tau=TAU)
    clipped = np.array(logits) > TAU
    assert 0.1 < clipped.mean() < 0.9
    # A difference in weights moves the logits, and these the next weights.
    for own, other in zip(found, expected, strict=True):
        assert_close(own, other, 64, condition=NEWTON_SCHULZ)


SHAPES = {"wide": (6, 15), "square": (5, 5), "odd": (7, 11), "tall": (9, 6)}
SHAPES = dict(share(SHAPES.items(), of=3))
GRADIENTS = {name: soap_gradients(shape) for name, shape in SHAPES.items()}
CHAINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "as in docs/combinations.md": (
        lambda side: curvax.scale_by_soap(
            b1=0.9, b2=0.95, b3=0.9, refresh=4, side=side, limit=float("inf")
        ),
        {
            "mu": 0.9,
            "b2": 0.95,
            "nesterov": False,
            "second_moment": "gradient",
            "refresh": "eigh",
        },
    ),
    "of Nesterov's momentum, as in the record": (
        lambda side: curvax.in_eigenbasis(
            optax.chain(curvax.momentum(0.95, nesterov=True), curvax.moment_ratio(0.0, 0.9)),
            b3=0.9,
            refresh=curvax.every(4, offset=0, first=True),
            method="qr",
            side=side,
        ),
        {"mu": 0.95, "b2": 0.9},
    ),
}


@pytest.mark.parametrize("chain", share(CHAINS, of=2))
def test_soap_before_muon_follows_the_transcription(chain: str) -> None:
    make, settings = CHAINS[chain]
    growing = {name: growing_gradients(shape) for name, shape in SHAPES.items()}
    for side, gradients in (("smaller", GRADIENTS), ("both", growing)):
        # Without ε: in front of it the transcription restores a norm.
        direction = optax.chain(
            make(side), curvax.orthogonalize(curvax.polar.newton_schulz(eps=0.0))
        )
        given = zip(*gradients.values(), strict=True)
        with jax.enable_x64(True):
            found, _ = run_scanned(direction, [dict(zip(SHAPES, g, strict=True)) for g in given])
        for name, own in gradients.items():
            expected, _ = soap_muon(own, K=4, late=False, side=side, ns_eps=0.0, **settings)
            for d, e in zip(found, expected, strict=True):
                assert_close(d[name], e, 64, condition=1e3 * NEWTON_SCHULZ)


def test_one_sided_shampoo_follows_the_transcription() -> None:
    """Also where the factor has no full rank: of a matrix with a row of zeros."""
    gradients = {
        **GRADIENTS,
        "singular": [g * (np.arange(6) > 0)[:, None] for g in GRADIENTS["wide"]],
    }
    direction = optax.chain(
        curvax.precondition(
            curvax.momentum(0.95), refresh=curvax.every(10), side="smaller", root=2, eps=0.0
        ),
        curvax.normalize_matrices(0.2),
    )
    given = zip(*gradients.values(), strict=True)
    with jax.enable_x64(True):
        found, _ = run_scanned(direction, [dict(zip(gradients, g, strict=True)) for g in given])
    for name, own in gradients.items():
        expected, _ = one_sided_shampoo(own)
        for d, e in zip(found, expected, strict=True):
            assert_close(d[name], e, 64, condition=1e3)
