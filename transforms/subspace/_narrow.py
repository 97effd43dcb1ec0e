r"""Bases and moments in bfloat16 between the steps of `in_subspace`.

A step widens them to float32 and rounds the new ones: bases to the nearest, moments up or down at
random (`weights/_rounding.py`). Rounded to the nearest, an average with a decay rate above 0.996
would stop: its increments are below half a unit. The random bits depend on the key of the matrix,
the step and the place, so that a restart repeats them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._stacks import key_for
from .._trees import widened
from .._validate import check_dtype
from ..directions._carry import Moments, put_moments, take_moments
from ..weights._rounding import random_bits, stochastic


def check_narrow(dtype: Any) -> Any:
    """The dtype of bases and moments, or `None`.

    Raises:
      ValueError: if it is neither bfloat16 nor float32.
    """
    found = None if dtype is None else check_dtype("dtype", dtype)
    if found not in (None, jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be 'bfloat16', 'float32' or None, got {dtype!r}.")
    return found


def widen(dtype: Any, state: Any) -> Any:
    """The state with basis and moments in float32 at least."""
    if dtype is None:
        return state
    subspace = state.subspace._replace(basis=widened(state.subspace.basis))
    moments = widened(take_moments(state.inner))
    return state._replace(subspace=subspace, inner=put_moments(state.inner, moments))


def narrow(dtype: Any, state: Any) -> Any:
    """The state with basis and moments in this dtype."""
    if dtype is None:
        return state
    found = take_moments(state.inner)
    arrays = iter(_in_dtype([*found.first, *found.second], state, dtype))
    moments = Moments(*([next(arrays) for _ in own] for own in found))
    basis = state.subspace.basis
    return state._replace(
        subspace=state.subspace._replace(basis=basis if basis is None else basis.astype(dtype)),
        inner=put_moments(state.inner, moments),
    )


def _in_dtype(arrays: list[jax.Array], state: Any, dtype: Any) -> list[jax.Array]:
    """Moments `(..., r, n)` in this dtype, rounded at random if it is bfloat16."""
    if dtype != jnp.bfloat16:
        return [x.astype(dtype) for x in arrays]

    def of_one(key: jax.Array, xs: list[jax.Array]) -> list[jax.Array]:
        words = jax.random.key_data(key_for(key, state.count))
        return [
            stochastic(x, random_bits(words + jnp.uint32(i), None, x.shape)).astype(dtype)
            for i, x in enumerate(xs)
        ]

    for _ in state.subspace.key.shape[:-1]:
        of_one = jax.vmap(of_one)
    return of_one(state.subspace.key, [x.astype(jnp.float32) for x in arrays])
