"""What programs say before they run: their text for a platform, and their temporaries."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax


def text_for(platform: str, f: Any, *args: Any) -> str:
    """What XLA takes for a platform, traced anew: JAX does not see what a test has replaced."""
    traced = jax.jit(lambda *x: f(*x)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def temporaries(f: Any, *args: Any, options: Mapping[str, Any] | None = None) -> int:
    """Bytes, of a step whose parameters and state, the first arguments, are updated in place."""
    lowered = jax.jit(f, donate_argnums=(0, 1)).lower(*args)
    memory: Any = lowered.compile(compiler_options=dict(options or {})).memory_analysis()
    updated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[:2]))
    assert memory.alias_size_in_bytes >= updated
    return memory.temp_size_in_bytes


def temporaries_per_gradient(optimizer: Any, layers: int, order: int) -> float:
    """Those of a train step of so many stacked square matrices, in units of their gradients."""
    params, x = {"kernel": jnp.zeros((layers, order, order))}, jnp.ones((order, 8))

    def step(params: Any, state: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.sum(jnp.tanh(p["kernel"] @ x)))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return temporaries(step, params, optimizer.init(params)) / params["kernel"].nbytes
