"""A state that is in the hosts' memory between steps.

Each array returns to the memory that it came from, which is a part of its type. So in a loop over
layers only the part of one layer is on a device.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from .._validate import as_transformation


def state_on_host(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is in the hosts' memory between steps.

    Its state is that of `optimizer`. Place it with `state_sharding(…, memory_kind="pinned_host")`:
    each update fetches the arrays that are in host memory and sends the new ones back. Small arrays
    stay on the devices.

    An ordinary step fetches the whole state, which is beside the gradients for a while; it saves
    the memory of the state during the forward and backward pass. With `curvax.layerwise` only the
    state of one layer is on the devices at a time. In both cases the state crosses the bus twice in
    a step: use it where the state does not fit.

    Args:
      optimizer: any Optax transformation, with or without `mesh=`.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("devices",))
      >>> params = {"kernel": jnp.ones((64, 32))}
      >>> optimizer = curvax.state_on_host(curvax.muon(0.02))
      >>> places = curvax.state_sharding(optimizer, params, mesh, memory_kind="pinned_host")
      >>> state = jax.jit(optimizer.init, out_shardings=places)(params)
      >>> step = jax.jit(optimizer.update, out_shardings=(None, places), donate_argnums=1)
      >>> updates, state = step(params, state, params)

      docs/memory.md has a whole step.
    """
    inner = as_transformation("optimizer", optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        near = jax.tree.map(lambda x: _in_space(x, jax.memory.Space.Device), state)
        updates, new = inner.update(updates, near, params, **extra_args)
        back = jax.tree.map(lambda x, old: _in_space(x, _space(old)), new, state)
        return updates, back

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _space(x: Any) -> Any:
    return jax.typeof(x).memory_space


def _in_space(x: Any, space: Any) -> Any:
    return x if _space(x) == space else jax.device_put(x, space)
