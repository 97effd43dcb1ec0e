"""One random key per matrix, independent of how matrices are stacked.

A key is folded from the seed, the path of the parameter and the matrix's index in the parameter.
`on_matrices` declares which parameters a stack holds; otherwise the leaf's own path is used. Keys
are stored as uint32 key data, which every checkpoint format supports.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

IMPLEMENTATION = "threefry2x32"

Members = tuple[tuple[str, int], ...]  # parameters and their numbers of matrices

_members: contextvars.ContextVar[dict[str, Members] | None] = contextvars.ContextVar(
    "members", default=None
)


@contextlib.contextmanager
def members_of(stacks: dict[str, Members]) -> Iterator[None]:
    """Declares, for the code inside, which parameters' matrices each stack holds."""
    token = _members.set(stacks)
    try:
        yield
    finally:
        _members.reset(token)


def matrix_names(tree: Any) -> list[Members]:
    """For each leaf `(..., m, n)`, the parameters whose matrices it holds, in order."""
    stacks = _members.get() or {}
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        names.append(stacks.get(name, ((name, math.prod(leaf.shape[:-2])),)))
    return names


def matrix_keys(tree: Any, seed: int) -> Any:
    """Key data, uint32 `(..., 2)`, for each leaf `(..., m, n)` of `tree`."""
    leaves, treedef = jax.tree.flatten(tree)
    base = jax.random.key(seed, impl=IMPLEMENTATION)

    def key_of(name: Any, place: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(base, name), place)

    def keys_of(members: Members, batch: tuple[int, ...]) -> jax.Array:
        # One call for all: two programs for each of 400 parameters take a minute to compile.
        counts = [count for _, count in members]
        hashes = np.array([zlib.crc32(name.encode()) for name, _ in members], np.uint32)
        names = np.repeat(hashes, counts)
        places = np.concatenate([np.arange(count, dtype=np.uint32) for count in counts])
        return jax.random.key_data(jax.vmap(key_of)(names, places)).reshape(*batch, -1)

    pairs = zip(matrix_names(tree), leaves, strict=True)
    return treedef.unflatten([keys_of(members, leaf.shape[:-2]) for members, leaf in pairs])


def key_for(data: jax.Array, number: jax.Array) -> jax.Array:
    """The key of draw `number`, from a matrix's key data `(2,)`."""
    return jax.random.fold_in(jax.random.wrap_key_data(data, impl=IMPLEMENTATION), number)
