"""Roots that saturate after a few steps, and Muon behind them, against the transcription."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.reference.saturated_muon import QUINTIC, saturated_muon
from tests.shared.transcriptions import HARD, Case, assert_follows

STEPS = {
    "quintic": ({}, {}),
    "three": ({"steps": 3}, {"root_steps": 3}),
    "classical": (
        {"steps": 6, "coefficients": (1.5, -0.5, 0.0)},
        {"root_steps": 6, "root_coefficients": (1.5, -0.5, 0.0)},
    ),
}


def amplified(rows: Any) -> float:
    """By how much steps multiply a perturbation at most."""
    return float(np.prod([row[0] for row in rows]))


SHAPES = [("wide", "row"), ("tall", "square")]


@pytest.mark.parametrize(
    ("name", "side", "shapes"), cells(STEPS, ["left", "right"], SHAPES, of=12), ids=str
)
def test_muon_behind_a_saturated_root_follows_the_transcription(
    name: str, side: str, shapes: tuple[str, ...]
) -> None:
    """Of statistics with one largest eigenvalue, which the Schatten norm meets exactly."""
    given, theirs = STEPS[name]
    method = curvax.eigenbases.saturated_roots(**given)
    preconditioned = curvax.precondition(
        curvax.momentum(0.95, accumulate="sum", nesterov=True),
        **{"refresh": curvax.every(1), "side": side, "root": 2, "eps": 0.0, "method": method},
    )
    polar = curvax.polar.newton_schulz(5, coefficients=QUINTIC, eps=0.0)
    expected = functools.partial(saturated_muon, side=side, eps=0.0, **theirs)
    condition = amplified(method.rows) * amplified(QUINTIC)
    ours = optax.chain(preconditioned, curvax.orthogonalize(polar))
    assert_follows(Case(ours, expected, {x: HARD[x] for x in shapes}, condition))


def test_many_classical_steps_are_the_root() -> None:
    """As "newton_schulz" is, without a number of steps."""
    classical = curvax.eigenbases.saturated_roots(40, coefficients=(1.5, -0.5, 0.0))
    g = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    found = []
    for method in (classical, "newton_schulz"):
        settings: dict[str, Any] = {"side": "left", "root": 2, "eps": 1e-3, "b2": 0.0}
        part = curvax.precondition(refresh=curvax.every(1), method=method, **settings)
        found.append(np.asarray(jax.jit(lambda g, p=part: p.update(g, p.init(g))[0])(g)))
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[1]).max()
