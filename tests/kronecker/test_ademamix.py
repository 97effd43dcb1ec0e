"""AdEMAMix in eigenbases: both first moments turn with the basis, the second one stays."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.reference.ademamix import soap_ademamix, warm_alpha, warm_b3
from tests.shared.soap import STEPS, growing_gradients
from tests.shared.transcriptions import Case, assert_follows

RATES: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "b3": 0.99, "alpha": 3.0, "eps": 1e-8}
WARM = 12


def in_basis(inner: Any) -> Any:
    return lambda period: curvax.in_eigenbasis(inner, refresh=curvax.every(period), method="eigh")


@pytest.mark.parametrize("shape", [(5, 5), (4, 9)])
def test_ademamix_in_an_eigenbasis_follows_the_transcription(shape: tuple[int, int]) -> None:
    case = Case(
        in_basis(optax.contrib.scale_by_ademamix(**RATES)),
        lambda g, k: soap_ademamix(g, K=k, **RATES),
        {"": growing_gradients(shape)},
        1e3,
        {"inner.nu": ("v", None)},
        periods=(1, 3, 7),
        factor=64.0,
    )
    assert_follows(case)


def test_weights_and_slow_rates_may_warm_up() -> None:
    """Optax counts the steps of a schedule from 0, the transcription from 1."""
    steps = range(1, STEPS + 1)
    alphas = np.array([warm_alpha(t, 3.0, WARM) for t in steps])
    slow = np.array([warm_b3(t, 0.9, 0.99, WARM) for t in steps])
    scheduled = {"alpha": lambda count: jnp.asarray(alphas)[count]}
    scheduled |= {"b3": lambda count: jnp.asarray(slow)[count]}
    case = Case(
        in_basis(optax.contrib.scale_by_ademamix(**{**RATES, **scheduled})),
        lambda g, k: soap_ademamix(g, K=k, **{**RATES, "alpha": alphas, "b3": slow}),
        {"": growing_gradients((5, 5))},
        1e3,
        periods=(4,),
        factor=64.0,
    )
    assert_follows(case)
