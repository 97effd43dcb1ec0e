"""Moments that follow a change of basis: where they are in a state, and what becomes of them.

A transformation that works in a changing space keeps moments that have to follow it. They are
recognized by where they are: a field `mu` or `trace` holds first moments, which turn with the
space; `nu` holds second moments. Any other field that holds more than a number for every matrix is
an error, since nothing is known of how it should follow: factors, bases, codes, scales of rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..linalg._numerics import HIGHEST

FIRST = ("mu", "trace")
SECOND = ("nu",)


class Moments(NamedTuple):
    """The moments of one leaf's matrices."""

    first: Any  # a list of them, or of their places among the leaves of a state
    second: Any  # the same


def find_moments(state: Any, like: Any) -> list[Moments]:
    """Where a state keeps moments of each leaf of `like`, a tree of matrices.

    Raises:
      ValueError: if another field holds more than a number for every matrix.
    """
    matrices = jax.tree_util.tree_leaves_with_path(like)
    most_axes = max((matrix.ndim - 2 for _, matrix in matrices), default=0)  # of a number for each
    found = [Moments([], []) for _ in matrices]
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        field, number = _place(path, leaf, matrices)
        if field in FIRST + SECOND and number is not None:
            (found[number].first if field in FIRST else found[number].second).append(index)
        elif leaf.ndim > most_axes:
            raise ValueError(
                f"the inner transformation's state field {field!r} holds more than a number for "
                f"every matrix; how it follows a change of basis is known for "
                f"{', '.join(map(repr, FIRST + SECOND))} only."
            )
    return found


def take_moments(state: Any, like: Any) -> Any:
    """A tree like `like`, with the `Moments` that a state keeps of every leaf."""
    leaves = jax.tree.leaves(state)
    moments = [
        Moments(*([leaves[place] for place in places] for places in found))
        for found in find_moments(state, like)
    ]
    return jax.tree.structure(like).unflatten(moments)


def put_moments(state: Any, like: Any, moments: Any) -> Any:
    """The state with other moments, from a tree as `take_moments` gives it."""
    leaves, treedef = jax.tree.flatten(state)
    new = jax.tree.structure(like).flatten_up_to(moments)
    for places, values in zip(find_moments(state, like), new, strict=True):
        for place, value in zip(jax.tree.leaves(places), jax.tree.leaves(values), strict=True):
            leaves[place] = value
    return treedef.unflatten(leaves)


def _place(path: Any, leaf: Any, matrices: list[tuple[Any, Any]]) -> tuple[str | None, int | None]:
    """The field that a leaf of a state is in, and the number of the leaf of matrices it belongs to.

    That is the one whose path ends the leaf's; the longest, where one path ends another.
    """
    ends = {
        len(own): number
        for number, (own, matrix) in enumerate(matrices)
        if leaf.shape == matrix.shape and path[len(path) - len(own) :] == own
    }
    longest = max(ends, default=0)
    names = [key.name for key in path[: len(path) - longest] if isinstance(key, GetAttrKey)]
    return (names[-1] if names else None), ends.get(longest)


@runtime_checkable
class Carry(Protocol):
    """What `carry=` takes: what moments `(r, n)` do when the basis of their rows changes."""

    @property
    def needs_names(self) -> bool:
        """Whether it matters which moments are first and which second ones."""
        ...

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """A first moment in the new basis; `turn (r, r)` is `U_newᵀ U_old`."""
        ...

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """A second moment in the new basis."""
        ...


@dataclasses.dataclass(frozen=True)
class Keep:
    """See `keep`."""

    needs_names = False

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """As it was."""
        del turn
        return moment

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """As it was."""
        del turn
        return moment


@dataclasses.dataclass(frozen=True)
class Rotate:
    """See `rotate`."""

    needs_names = True

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Turned."""
        return jnp.matmul(turn, moment, precision=HIGHEST).astype(moment.dtype)

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Mixed by the squares of the turn."""
        return self.first(moment, turn**2)


@dataclasses.dataclass(frozen=True)
class Reset:
    """See `reset`."""

    needs_names = True

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Zero."""
        del turn
        return jnp.zeros_like(moment)

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Zero."""
        return self.first(moment, turn)


def keep() -> Keep:
    """Moments stay as they are, whatever the new basis (GaLore, Alice)."""
    return Keep()


def rotate() -> Rotate:
    r"""First moments turn with the basis (SUMO): $M \leftarrow R M$, $R = U_{new}^\top U_{old}$.

    What lies outside the new subspace is lost. Second moments become $(R \circ R)\, v$: what the
    squares are expected to be if the old coordinates are uncorrelated, never negative.
    """
    return Rotate()


def reset() -> Reset:
    """Moments start again from zero; counters, as of Adam's bias correction, go on."""
    return Reset()
