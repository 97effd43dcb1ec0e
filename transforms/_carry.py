"""Finding the moments in the state of an element-wise transformation, by the names of their fields.

A transformation that works in a changing space keeps moments that have to follow it. They are
recognized by where they are: a field `mu` or `trace` holds first moments, which turn with the
space; `nu` holds second moments. Any other field with an array for every matrix is an error, since
nothing is known of how it should follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey

FIRST = ("mu", "trace")
SECOND = ("nu",)


class Moments(NamedTuple):
    """Where the moments of every matrix are among the leaves of a state."""

    first: tuple[tuple[int, ...], ...]  # for every matrix the indices of its first moments
    second: tuple[tuple[int, ...], ...]  # and of its second moments


def find_moments(state: Any, like: Any) -> Moments:
    """Where a state keeps moments of the matrices in `like`, a tree of arrays.

    Raises:
      ValueError: if a field of another name holds arrays of the matrices' shapes.
    """
    matrices = jax.tree_util.tree_leaves_with_path(like)
    first: list[list[int]] = [[] for _ in matrices]
    second: list[list[int]] = [[] for _ in matrices]
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        for number, (suffix, matrix) in enumerate(matrices):
            head = path[: len(path) - len(suffix)]
            if leaf.shape != matrix.shape or path[len(head) :] != suffix:
                continue
            names = [key.name for key in head if isinstance(key, GetAttrKey)]
            field = names[-1] if names else None
            if field in FIRST:
                first[number].append(index)
            elif field in SECOND:
                second[number].append(index)
            else:
                raise ValueError(
                    f"the inner transformation's state field {field!r} holds an array for every "
                    f"matrix; how it follows a change of basis is known for "
                    f"{', '.join(map(repr, FIRST + SECOND))} only."
                )
    return Moments(tuple(map(tuple, first)), tuple(map(tuple, second)))
