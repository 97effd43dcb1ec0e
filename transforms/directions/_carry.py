"""Moments that follow a change of basis: how to find them in a state, and how to carry them over.

The inner transformation of `in_subspace` or `in_eigenbasis` keeps its moments in the coordinates of
a basis. When the basis changes, a `Carry` maps them to the new coordinates. Moments are found by
the name of their field:

| field | moment |
|---|---|
| `mu`, `trace` | first moment, rotates with the basis |
| `nu` | second moment, mixes by the squares of the rotation |
| any other field with more than one number per matrix | an error |

No rule is known for such other fields: factors, bases, quantized moments, row scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..linalg._numerics import HIGHEST

FIRST = ("mu", "trace")
SECOND = ("nu",)


class Moments(NamedTuple):
    """The moments of one leaf's matrices."""

    first: Any  # a list of arrays, or of their indices among the leaves of a state
    second: Any  # the same for second moments


def find_moments(state: Any, like: Any) -> list[Moments]:
    """Finds the moments that a state keeps of each leaf of `like`, a tree of matrices.

    Raises:
      ValueError: if another field holds more than one number per matrix.
    """
    matrices = jax.tree_util.tree_leaves_with_path(like)
    # The batch axes: a leaf with one number per matrix has no more.
    most_axes = max((matrix.ndim - 2 for _, matrix in matrices), default=0)
    found = [Moments([], []) for _ in matrices]
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        field, number = _place(path, leaf, matrices)
        if field in FIRST + SECOND and number is not None:
            (found[number].first if field in FIRST else found[number].second).append(index)
        elif leaf.ndim > most_axes:
            raise ValueError(
                f"the inner transformation's state field {field!r} holds more than one number per "
                "matrix; only the fields "
                f"{', '.join(map(repr, FIRST + SECOND))} can follow a change of basis."
            )
    return found


def take_moments(state: Any, like: Any) -> Any:
    """A tree like `like` with the `Moments` that a state keeps of each leaf."""
    leaves = jax.tree.leaves(state)
    moments = [
        Moments(*([leaves[place] for place in places] for places in found))
        for found in find_moments(state, like)
    ]
    return jax.tree.structure(like).unflatten(moments)


def put_moments(state: Any, like: Any, moments: Any) -> Any:
    """Replaces the moments of a state by those of a tree like the result of `take_moments`."""
    leaves, treedef = jax.tree.flatten(state)
    new = jax.tree.structure(like).flatten_up_to(moments)
    for places, values in zip(find_moments(state, like), new, strict=True):
        for place, value in zip(jax.tree.leaves(places), jax.tree.leaves(values), strict=True):
            leaves[place] = value
    return treedef.unflatten(leaves)


def _place(path: Any, leaf: Any, matrices: list[tuple[Any, Any]]) -> tuple[str | None, int | None]:
    """The field of a state's leaf, and the index of the matrix leaf of its shape it belongs to."""
    number = _owner(path, matrices, lambda matrix: leaf.shape == matrix.shape)
    own = () if number is None else matrices[number][0]
    names = [key.name for key in path[: len(path) - len(own)] if isinstance(key, GetAttrKey)]
    return (names[-1] if names else None), number


def owner_of(path: Any, leaf: Any, matrices: list[tuple[Any, Any]]) -> int | None:
    """The index of the matrix leaf that a state's leaf with its batch axes belongs to, if any."""
    return _owner(path, matrices, lambda matrix: leaf.shape[: matrix.ndim - 2] == matrix.shape[:-2])


def _owner(path: Any, matrices: list[tuple[Any, Any]], fits: Callable[[Any], bool]) -> int | None:
    """The index of the matrix leaf that fits, and whose path is the longest suffix of `path`."""
    ends = {
        len(own): number
        for number, (own, matrix) in enumerate(matrices)
        if fits(matrix) and path[len(path) - len(own) :] == own
    }
    return ends.get(max(ends, default=0))


@runtime_checkable
class Carry(Protocol):
    """The type of `carry=`: maps moments `(r, n)` to a new basis of their rows."""

    @property
    def needs_names(self) -> bool:
        """Whether the rule needs to know which moments are first and which are second."""
        ...

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Maps a first moment to the new basis; `turn (r, r)` is `U_newᵀ U_old`."""
        ...

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Maps a second moment to the new basis."""
        ...


@dataclasses.dataclass(frozen=True)
class Keep:
    """See `keep`."""

    needs_names = False

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Returns the moment unchanged."""
        del turn
        return moment

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Returns the moment unchanged."""
        del turn
        return moment


@dataclasses.dataclass(frozen=True)
class Rotate:
    """See `rotate`."""

    needs_names = True

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Rotates the moment."""
        return jnp.matmul(turn, moment, precision=HIGHEST).astype(moment.dtype)

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Mixes the moment by the squares of the rotation."""
        return self.first(moment, turn**2)


@dataclasses.dataclass(frozen=True)
class Reset:
    """See `reset`."""

    needs_names = True

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Returns zeros."""
        del turn
        return jnp.zeros_like(moment)

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Returns zeros."""
        return self.first(moment, turn)


def keep() -> Keep:
    """Keeps moments unchanged under a new basis (GaLore, Alice)."""
    return Keep()


def rotate() -> Rotate:
    r"""Rotates first moments with the basis (SUMO): $M \leftarrow R M$, $R = U_{new}^\top U_{old}$.

    Components outside the new subspace are lost. Second moments become $(R \circ R)\, v$, which is
    never negative: the expected squares if the old coordinates are uncorrelated.
    """
    return Rotate()


def reset() -> Reset:
    """Resets moments to zero; counters, such as that of Adam's bias correction, go on."""
    return Reset()
