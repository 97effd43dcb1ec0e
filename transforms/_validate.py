"""Checks of arguments, shared by every factory.

Each check raises a `ValueError` that names the argument, the value it got and what is allowed.
Traced values pass unchecked: `optax.inject_hyperparams` calls factories with tracers.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def _concrete(value: Any) -> float | None:
    """The number behind `value`, or None if it is traced."""
    if isinstance(value, Tracer):
        return None
    if isinstance(value, numbers.Real) or (
        isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0
    ):
        return float(value)
    return float("nan")


def check_interval(
    name: str,
    value: Any,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = True,
) -> None:
    """Requires `value` between `low` and `high`; an open end is excluded."""
    number = _concrete(value)
    if number is None:
        return
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name} must be a number in {bounds}, got {value!r}.")


def check_decay(name: str, value: Any) -> None:
    """Requires a decay rate of a moving average: 0 <= value < 1."""
    check_interval(name, value, 0.0, 1.0)


def check_positive_int(name: str, value: Any) -> None:
    """Requires an integer of at least 1 (and no bool)."""
    if isinstance(value, Tracer):
        return
    integral = isinstance(value, numbers.Integral) or (
        isinstance(value, (np.ndarray, jax.Array))
        and value.ndim == 0
        and jnp.issubdtype(value.dtype, jnp.integer)
    )
    if isinstance(value, bool) or not integral or int(value) < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Requires `value` to be one of `allowed`."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_bool(name: str, value: Any) -> None:
    """Requires a bool."""
    if not isinstance(value, (bool, np.bool_, Tracer)):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_dtype(name: str, value: Any) -> np.dtype:
    """The dtype that `value` names, which has to be a real floating one."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a real floating dtype, got {value!r}.")
    return dtype


def check_matrices(tree: Any, method: str) -> None:
    """Requires every leaf of `tree` to be a real matrix or a batch of them, `(..., m, n)`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.ndim(leaf) < 2:
            raise ValueError(
                f"{method} works on matrices (..., rows, columns), but the leaf {name!r} has shape "
                f"{jnp.shape(leaf)}. Wrap the transformation in curvax.on_matrices, or use the "
                "full optimizer, which sends such leaves to AdamW."
            )
        check_real(name, leaf)


def check_real(name: str, leaf: Any) -> None:
    """Requires a leaf of a real floating dtype and without a zero-size axis."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"the parameter {name!r} has dtype {dtype}; parameters must have a real floating "
            "dtype. Keep others out of the optimizer (optax.masked, or nnx's `wrt`)."
        )
    if 0 in jnp.shape(leaf):
        raise ValueError(
            f"the parameter {name!r} has shape {jnp.shape(leaf)}: every axis must be at least 1."
        )
