"""Tree maps that JAX does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_unzip(outputs: int, f: Callable[..., tuple[Any, ...]], tree: Any, *rest: Any):
    """Maps `f`, which returns `outputs` values for each leaf of `tree`, to as many trees.

    The trees of `rest` may have whole subtrees where `tree` has a leaf.
    """
    leaves, treedef = jax.tree.flatten(tree)
    columns = [treedef.flatten_up_to(r) for r in rest]
    results = [f(*row) for row in zip(leaves, *columns, strict=True)]
    return tuple(treedef.unflatten([result[i] for result in results]) for i in range(outputs))


def widened(tree: Any) -> Any:
    """The arrays of `tree` in float32 at least."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)
