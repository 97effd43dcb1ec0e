"""States that are divided among devices, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

import curvax


def abstract_state(optimizer: Any, params: Any, mesh: Mesh) -> Any:
    """The state's shapes, and how it lies."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        curvax.state_sharding(optimizer, params, mesh),
    )


def own_bytes(state: Any) -> int:
    """The bytes of a state on one device."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state)
    )
