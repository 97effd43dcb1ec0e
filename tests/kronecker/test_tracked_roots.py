"""Inverse roots from tracked eigenbases against a transcription."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close
from tests.reference.tracked_roots import tracked_roots
from tests.shared.soap import soap_gradients, soap_trajectory


def _condition(states: list[dict[str, Any]]) -> float:
    """The largest condition number of a root's argument: eigenvalues of H, largest by smallest."""
    blocks = [s[name] for s in states for name in ("H_L", "H_R") if s[name] is not None]
    return max(float(np.linalg.cond(H)) for H in blocks)


@pytest.mark.parametrize(
    ("shape", "b1", "settings"),
    [
        ((5, 8), 0.9, {"sides": "left", "root": 2}),
        (
            (5, 5),
            None,
            {
                "sides": "both",
                "root": 4,
                "period": 3,
                "damping": "relative",
                "eps": 1e-6,
                "initial": 1e-6,
            },
        ),
    ],
    ids=["left, square root", "both sides, fourth root"],
)
def test_roots_follow_the_transcription(
    shape: tuple[int, int], b1: float | None, settings: dict[str, Any]
) -> None:
    gradients = soap_gradients(shape)
    desired, states = tracked_roots(gradients, b1=b1, **settings)
    with jax.enable_x64(True):
        transformation = curvax.precondition(
            None if b1 is None else curvax.momentum(b1),
            refresh=curvax.every(settings.get("period", 1), offset=1),
            side=settings["sides"],
            root=settings["root"],
            b2=0.95,
            eps=settings.get("eps", 1e-6),
            damping_mode=settings.get("damping", "absolute"),
            initial=settings.get("initial", 0.0),
            solver="tracked",
        )
        found, _ = soap_trajectory(transformation, [g[None] for g in gradients])
        assert_close(found[:, 0], np.stack(desired), 64, condition=_condition(states))
