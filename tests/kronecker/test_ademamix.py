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
# Optax counts the steps of a schedule from 0, the transcription from 1.
WARM = {
    "alpha": np.array([warm_alpha(t, 3.0, 12) for t in range(1, STEPS + 1)]),
    "b3": np.array([warm_b3(t, 0.9, 0.99, 12) for t in range(1, STEPS + 1)]),
}


def scheduled(values: np.ndarray) -> Any:
    return lambda count: jnp.asarray(values)[count]


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
