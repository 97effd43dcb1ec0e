"""Wrappers for parameters in bfloat16 give their inner optimizer everything in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._paths import named_leaves
from .._validate import check_state_given


def check_given(state: Any, params: Any) -> None:
    """Requires a state and parameters in `update`."""
    check_state_given(state)
    if params is None:
        raise ValueError("update needs params: optimizer.update(gradients, state, params).")


def init_inner(inner: optax.GradientTransformation, params: Any) -> Any:
    """The state of the inner optimizer; its moments are in float32, like the parameters it sees."""
    for name, p in named_leaves(params).present().items():
        if jnp.result_type(p) == jnp.float16:
            raise ValueError(
                f"the parameter {name!r} has dtype float16, whose small numbers have fewer bits; "
                "wrappers for low precision take bfloat16 and leave float32 as it is."
            )
    return inner.init(widen_narrow(params))


def update_inner(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: Any, wide_params: Any = None
) -> Any:
    """The inner update, with `state.inner`; what belongs to bfloat16 goes in as float32."""
    check_given(state, params)
    state = state.inner
    wide_params = widen_narrow(params) if wide_params is None else wide_params
    updates = jax.tree.map(lambda p, g: wide(g) if is_narrow(p) else g, params, updates)
    return inner.update(updates, state, wide_params, **extra_args)


def is_narrow(p: Any) -> bool:
    """Whether a parameter is in bfloat16."""
    return jnp.result_type(p) == jnp.bfloat16


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, exactly."""
    return x.astype(jnp.float32)


def widen_narrow(params: Any) -> Any:
    """The parameters, with those in bfloat16 in float32."""
    return jax.tree.map(lambda p: wide(p) if is_narrow(p) else p, params)


def map_narrow(f: Any, params: Any) -> Any:
    """A tree with `f` of each parameter in bfloat16, and a hole for each other parameter."""
    return jax.tree.map(lambda p: f(p) if is_narrow(p) else optax.MaskedNode(), params)
