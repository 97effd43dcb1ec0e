"""KL-Shampoo, from roots and in eigenbases, and KL-SOAP, against NumPy float64 transcriptions."""

from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned, share
from tests.reference.kl_shampoo import kl_shampoo, kl_shampoo_eigenbasis, kl_soap
from tests.shared.soap import soap_gradients

SHAPES = {"wide": (6, 15), "square": (5, 5), "tall": (9, 6), "odd": (7, 11)}
SHAPES = dict(share(SHAPES.items(), of=2))


def gradients(shape: tuple[int, int]) -> list[np.ndarray]:
    """The first one is diagonal, so that its eigenbasis and that of the initial factors agree.

    Papers and official code do not say what eigenvalues are in a first eigenbasis.
    """
    first = np.zeros(shape)
    np.fill_diagonal(first, np.linspace(3, 2, min(shape)))
    return [first, *soap_gradients(shape)[1:]]


GRADIENTS = {name: gradients(shape) for name, shape in SHAPES.items()}
STEPS = [dict(zip(SHAPES, step, strict=True)) for step in zip(*GRADIENTS.values(), strict=True)]
INF = float("inf")


def initial_of(name: str, settings: dict[str, Any]) -> float:
    """Where our factors start: at the root of the first gradient's mean square by default."""
    return settings.get("initial") or float(np.sqrt(np.mean(GRADIENTS[name][0] ** 2)))


ROOTS = {
    "fresh roots": (1, {}),
    "stale roots and momentum": (4, {"b1": 0.9}),
    # The first inverse, of the initial factors, has no ε here; the paper prints none.
    "another start and ε": (4, {"initial": 0.1, "initial_root": 0.1**-0.5, "eps": 1e-3}),
}


@pytest.mark.parametrize("case", share(ROOTS, of=2))
def test_whitened_statistics_of_precondition_follow_the_transcription(case):
    period, theirs = ROOTS[case]
    ours = {name: value for name, value in theirs.items() if name in ("initial", "eps")}
    direction = curvax.precondition(
        curvax.momentum(theirs["b1"]) if "b1" in theirs else None,
        refresh=curvax.every(period),
        root=2,
        b2=0.95,
        statistics="kl",
        **{"eps": 0.0, **ours},
    )
    with jax.enable_x64(True):
        found, states = run_scanned(direction, STEPS)
    for name in SHAPES:
        settings = {**theirs, "initial": initial_of(name, theirs)}
        expected, kept = kl_shampoo(GRADIENTS[name], K=period, **settings)
        for t in range(len(STEPS)):
            assert_close(found[t][name], expected[t], 64, condition=1e3)
            assert_close(states[t][name].left.statistic, kept[t]["L"], 64, condition=1e3)
            assert_close(states[t][name].right.statistic, kept[t]["R"], 64, condition=1e3)


KL: dict[str, Any] = {"b": 0.95, "start": "identity", "skip_first": False, "K": 4}
QR: dict[str, Any] = {**KL, "refresh": "qr", "sort": True, "at_refresh": "permute"}
BASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "kl_shampoo": (
        curvax.scale_by_kl_shampoo(b1=0.9, b2=0.95, refresh=4, limit=INF),
        kl_shampoo_eigenbasis,
        {**QR, "b1": 0.9},
    ),
    "kl_shampoo by eigh": (
        curvax.scale_by_kl_shampoo(
            b1=0.0, b2=0.95, refresh=4, initial=0.1, method="eigh", limit=INF
        ),
        kl_shampoo_eigenbasis,
        {**KL, "refresh": "eigh", "at_refresh": "keep", "initial": 0.1},
    ),
    "kl_soap": (
        curvax.scale_by_soap(refresh=4, statistics="kl", method="qr", limit=INF),
        kl_soap,
        QR,
    ),
}


@pytest.mark.parametrize("case", share(BASES, of=2))
def test_whitened_statistics_in_eigenbases_follow_the_transcription(case):
    ours, transcription, settings = BASES[case]
    with jax.enable_x64(True):
        found, states = run_scanned(ours, STEPS)
    for name in SHAPES:
        start = initial_of(name, settings)
        expected, kept = transcription(
            GRADIENTS[name], **{**settings, "initial": start, "initial_factor": start}
        )
        for t in range(len(STEPS)):
            left, right = states[t][name].left, states[t][name].right
            assert_close(left.statistic, kept[t]["L"], 64, condition=1e3)
            assert_close(right.statistic, kept[t]["R"], 64, condition=1e3)
            assert_close(found[t][name], expected[t], 64, condition=1e4)
            assert_close(np.sort(left.spectrum), np.sort(kept[t]["d_L"]), 64, condition=1e4)
