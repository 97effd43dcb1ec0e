"""SOAP, Eigen-Adam and AdaDiag against NumPy float64 transcriptions of the papers."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, share
from tests.reference.soap import adadiag, eigen_adam, soap
from tests.shared.soap import STEPS, one_eigen_adam, soap_gradients, soap_trajectory

SHAPES = {"wide": (6, 9), "tall": (9, 6), "square": (5, 5), "odd": (7, 11)}


@functools.cache
def _soap(variant, **options):
    """SOAP from its refresh policy."""
    ours, _ = VARIANTS[variant]
    return lambda refresh: curvax.scale_by_soap(refresh=refresh, **options, **ours)


def _side_of_full_rank(shape) -> str:
    return "left" if shape[0] <= shape[1] else "right"


CORRECTED: dict[str, Any] = {"eps": 1e-8, "bias_correction": True}
RATES: dict[str, Any] = {"b1": 0.9, "b2": 0.99, "b3": 0.8}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "corrected": (CORRECTED, CORRECTED),
    "first step skipped": ({"skip_first": True}, {"skip_first": True}),
    "by QR": ({"method": "qr"}, {"refresh": "qr", "carry_v": "permute"}),
    "other decay rates": (RATES, RATES),
}
PERIODS = [1, 4, 7]


def _with_all_periods(cases):
    """Periods are data of a case's program, which runs in one worker."""
    marked = [(case, pytest.mark.xdist_group("SOAP: " + ", ".join(case))) for case in cases]
    return [pytest.param(*case, k, marks=mark) for case, mark in marked for k in PERIODS]


@pytest.mark.parametrize(
    ("name", "variant", "period"),
    _with_all_periods(share(itertools.product(SHAPES, VARIANTS), of=7)),
)
def test_one_side_follows_the_transcription(name, variant, period):
    shape, (_, theirs) = SHAPES[name], VARIANTS[variant]
    side, gradients = _side_of_full_rank(shape), soap_gradients(SHAPES[name])
    desired, _ = soap(gradients, K=period, side=side, **theirs)
    with jax.enable_x64(True):
        found, states = soap_trajectory(_soap(variant, side=side), gradients, period=period)
        kappa = float(np.linalg.cond(gradients[0])) ** 2
        assert_close(found, np.stack(desired), 64, condition=kappa)
    basis = states.left if side == "left" else states.right
    due = [t for t in range(1, STEPS + 1) if t == 1 or t % period == 0]
    assert basis.refreshes[-1] == len(due) and not basis.rejected.any()


@pytest.mark.parametrize(
    ("variant", "period"),
    _with_all_periods(share([("plain",), ("corrected",), ("first step skipped",)], of=2)),
)
def test_soap_follows_the_transcription(variant, period):
    """Both sides of a square matrix. Noise off the diagonal at step 1 is left out of account."""
    _, theirs = VARIANTS[variant]
    gradients = soap_gradients((5, 5))
    desired, expected = soap(gradients, K=period, side="both", **theirs)
    with jax.enable_x64(True):
        found, states = soap_trajectory(_soap(variant), gradients, period=period)
        kappa = float(np.linalg.cond(gradients[0])) ** 4
        assert_close(found[1:], np.stack(desired)[1:], 64, condition=kappa)
        assert_close(states.left.statistic[-1], expected[-1]["L"], 64)
        assert_close(states.right.statistic[-1], expected[-1]["R"], 64)
        assert_close(states.inner.nu[-1], expected[-1]["v"], 64, condition=kappa)


@pytest.mark.parametrize("method", ["eigen_adam", "adadiag"])
def test_eigen_adam_and_adadiag_follow_the_transcription(method):
    gradients = soap_gradients((6, 9))
    reference = {"eigen_adam": eigen_adam, "adadiag": adadiag}[method]
    desired, _ = reference(gradients, K=4)
    adadiag_of_ours = curvax.scale_by_eigen_adam(b3=0.0, refresh=4)
    direction = {"eigen_adam": one_eigen_adam(), "adadiag": adadiag_of_ours}[method]
    with jax.enable_x64(True):
        found, _ = soap_trajectory(direction, gradients)
        kappa = max(float(np.linalg.cond(g)) for g in gradients) ** 2
        assert_close(found, np.stack(desired), 256, condition=kappa)


def test_float32_follows_the_transcription():
    gradients = [np.float64(np.float32(g)) for g in soap_gradients((6, 9))]
    desired, _ = soap(gradients, K=4, side="left")
    found, _ = soap_trajectory(curvax.scale_by_soap(refresh=4, side="left"), gradients, "float32")
    assert found.dtype == jnp.float32
    kappa = float(np.linalg.cond(gradients[0])) ** 2
    assert_close(found, np.stack(desired), 64, condition=kappa)


def test_second_moments_are_kept_between_refreshes():
    """A SOAP in circulation drops them: the second moment then is one gradient's square."""
    gradients = soap_gradients((6, 9))
    with jax.enable_x64(True):
        _, states = soap_trajectory(one_eigen_adam(), gradients)
        u, expected = states.left.basis, np.zeros((6, 9))
        for t in range(STEPS):
            expected = 0.95 * expected + 0.05 * (u[t].T @ gradients[t]) ** 2
            assert_close(states.inner.nu[t], expected, 256)
