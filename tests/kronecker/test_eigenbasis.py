"""Transformations in eigenbases: AdEMAMix, a first step, narrow moments, bases read one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.storage import _quantized
from tests.helpers import assert_close
from tests.reference.ademamix import soap_ademamix, warm_alpha, warm_b3
from tests.shared.policies import stepped
from tests.shared.soap import STEPS, growing_gradients, soap_gradients, soap_trajectory
from tests.shared.transcriptions import Case, assert_follows, scheduled

RATES: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "b3": 0.99, "alpha": 3.0, "eps": 1e-8}
WARM = {
    "alpha": np.array([warm_alpha(t, 3.0, 12) for t in range(1, STEPS + 1)]),
    "b3": np.array([warm_b3(t, 0.9, 0.99, 12) for t in range(1, STEPS + 1)]),
}


@pytest.mark.parametrize(
    ("shape", "warm", "periods"),
    [((5, 5), {}, (1, 3, 7)), ((4, 9), {}, (1, 3, 7)), ((5, 5), WARM, (4,))],
    ids=["square", "wide", "with a weight and a slow rate that warm up"],
)
def test_ademamix_in_an_eigenbasis_follows_the_transcription(
    shape: tuple[int, int], warm: Any, periods: tuple[int, ...]
) -> None:
    rates = RATES | {name: scheduled(values) for name, values in warm.items()}
    inner, theirs = optax.contrib.scale_by_ademamix(**rates), RATES | warm
    case = Case(
        lambda k: curvax.in_eigenbasis(inner, refresh=curvax.every(k), method="eigh"),
        lambda g, k: soap_ademamix(g, K=k, **theirs),
        {"": growing_gradients(shape)},
        1e3,
        {"inner.nu": ("v", None)},
        periods=periods,
        factor=64.0,
    )
    assert_follows(case)


def test_no_rounding_noise_is_raised_to_the_length_of_an_entry() -> None:
    """SOAP's first direction is the polar factor, times √(1 - b2)."""
    soap, random = curvax.scale_by_soap(), np.random.default_rng(0)
    plain = random.standard_normal((12, 32, 32)).astype(np.float32)
    for gradients in (plain, plain[:, random.permutation(32)]):
        found, _ = jax.jit(lambda g: soap.update(g, soap.init(g)))(gradients)
        u, _, v = np.linalg.svd(gradients.astype(float))
        error = np.linalg.norm(found - 0.05**0.5 * u @ v, axis=(1, 2))
        assert (error < 0.01 * (0.05 * 32) ** 0.5).all()


def test_the_first_moment_may_be_in_bfloat16():
    gradients = soap_gradients((5, 9))
    found, states = soap_trajectory(
        curvax.scale_by_soap(dtype=jnp.bfloat16, refresh=2, side="smaller"), gradients, "float32"
    )
    assert (states.inner.mu.dtype, states.inner.nu.dtype) == (jnp.bfloat16, jnp.float32)
    whole, _ = soap_trajectory(
        curvax.scale_by_soap(refresh=2, side="smaller"), gradients, "float32"
    )
    error = np.linalg.norm(found - whole) / np.linalg.norm(whole)
    assert 1e-5 < error < 0.02  # bfloat16 has 8 bits


def test_bases_that_are_read_one_by_one_give_the_same_directions(monkeypatch):
    """In a loop over the matrices of a leaf, with the inner transformation and its state inside."""
    storage = curvax.packed(block=4, min_elements=25)
    settings = {"refresh": curvax.every(2), "side": "left", "storage": storage}
    wrapped = curvax.in_eigenbasis(optax.scale_by_adam(), **settings)
    draw = np.random.default_rng(0)
    shapes = {"large": (2, 6, 9), "small": (3, 4)}
    gradients = {k: draw.standard_normal((4, *x), np.float32) for k, x in shapes.items()}

    def run(start):
        monkeypatch.setattr(_quantized, "SINGLY_FROM", start)
        return list(stepped(wrapped, gradients))

    at_once, one_by_one = run(1000), run(5)
    assert_close(one_by_one, at_once, 256)
    assert jax.tree.leaves(one_by_one[-1][1]["large"].inner)[0] == 4
