"""Derivatives of QR decompositions and complements, by LAPACK and by panels as on TPUs."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg import _qr
from tests.tpu_forms import forms_of_tpus

PLATFORMS = {"lapack": contextlib.nullcontext, "tpu": forms_of_tpus}
FUNCTIONS: dict[str, Any] = {
    "complement": _qr.orthogonal_complement,
    "qr": lambda x: jnp.concatenate(_qr.qr(x)),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_differences(name: str, platform: str) -> None:
    """In reverse mode, of one matrix and of a stack."""
    random = np.random.default_rng(0)
    with PLATFORMS[platform](), jax.enable_x64(True):
        x, along = (jnp.asarray(random.normal(size=(2, 5, 2))) for _ in range(2))
        loss = lambda x: jnp.sum(jnp.sin(3 * FUNCTIONS[name](x)))  # noqa: E731
        both = jax.jit(jax.value_and_grad(loss))
        stacked = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x))))(x)
        step = 1e-6
        for own, direction, of_stack in zip(x, along, stacked, strict=True):
            found = np.vdot(both(own)[1], direction)
            ahead, behind = (both(own + c * direction)[0] for c in (step, -step))
            difference = (ahead - behind) / (2 * step)
            assert abs(found - difference) < 1e-6 * abs(difference)
            assert abs(np.vdot(of_stack, direction) - found) < 1e-9 * abs(found)
