"""Decompositions of many matrices, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def one_by_one(f: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """`f` of every matrix of `x (..., m, n)`, in one loop.

    On CPUs a decomposition of a batch (LAPACK's, in jaxlib 0.10) occupies one of XLA's threads
    while it waits for others. Where as many batches are decomposed at once as there are threads,
    as with two shapes on two cores, all wait forever.

    Args:
      f: from a matrix `(m, n)` to arrays of any shapes.
      x: the matrices.

    Returns:
      What `f` returns, with the leading axes of `x` in front.
    """
    batch = x.shape[:-2]
    found = jax.lax.map(f, x.reshape(-1, *x.shape[-2:]))
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)
