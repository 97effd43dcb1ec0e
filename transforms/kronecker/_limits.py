"""How long the directions of `in_eigenbasis` are while its bases stay: root mean squares."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..directions._moment_ratio import largest_ratio
from ..refresh._policy import RefreshPolicy
from ._whitened import largest_whitened


def limit_of_moments(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, refresh: RefreshPolicy
) -> Any:
    """The largest root mean square of `moment_ratio(b1, b2)` in a basis that never turns.

    It is infinite with `every(1)`: there a turned moment is divided by a variance of the other
    basis at every step, and the papers' trajectories exceed the bound.
    """
    return _unless_renewed(largest_ratio(b1, b2), refresh)


def limit_of_eigenvalues(
    b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike, refresh: RefreshPolicy
) -> Any:
    """The same for `momentum(b1)`, divided by the roots of eigenvalues averaged with `b2`."""
    return _unless_renewed(largest_whitened(b1, b2), refresh)


def _unless_renewed(most: Any, refresh: RefreshPolicy) -> Any:
    period = refresh.schedule.period
    if isinstance(period, Tracer):
        return jnp.where(period > 1, most, jnp.inf)
    return most if period > 1 else float("inf")
