"""States with one entry that is not finite."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def damaged(state: Any, value: float) -> Iterator[tuple[str, Any]]:
    """A state for each of its floating arrays: its first matrix has `value` as its last entry."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    for i, (path, x) in enumerate(paths):
        if x.ndim and jnp.issubdtype(x.dtype, jnp.inexact):
            leaves = [leaf for _, leaf in paths]
            spoiled = np.array(x)
            spoiled[(0, *[-1] * (x.ndim - 1))] = value
            leaves[i] = spoiled
            yield jax.tree_util.keystr(path), treedef.unflatten(leaves)
