"""Element-wise transformations of a tree of matrices, run on some of its leaves at a time.

A loop over the matrices of one leaf can so contain the transformation, and what comes before and
after it. The other leaves are `None` in the trees and in the state that the transformation gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

from ._carry import owner_of


@dataclasses.dataclass(frozen=True)
class Part:
    """Some leaves of a tree of matrices, and what the state of a transformation keeps of them."""

    inner: optax.GradientTransformation
    treedef: Any
    state_treedef: Any
    leaves: tuple[int, ...]  # places of the matrices among the leaves of the tree
    kept: tuple[int, ...]  # places of what is kept of them among the leaves of the state
    shared: dict[int, Any]  # leaves of the state that this part reads and another one renews

    def update(self, matrices: Sequence[Any], own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What the transformation returns for these matrices and their part of the state."""
        given = _filled(self.treedef, dict(zip(self.leaves, matrices, strict=True)))
        state = self.shared | dict(zip(self.kept, own, strict=True))
        moved, new = self.inner.update(given, _filled(self.state_treedef, state))
        found = dict(zip(sorted(state), jax.tree.leaves(new), strict=True))
        return jax.tree.leaves(moved), [found[place] for place in self.kept]


def parts_of(
    inner: optax.GradientTransformation, state: Any, like: Any, alone: Sequence[bool]
) -> list[Part]:
    """A part for each leaf of `like` that is `alone`, after one for the others and the shared rest.

    The shared rest of a state is what belongs to no leaf, such as a count of steps.
    """
    matrices, treedef = jax.tree_util.tree_flatten_with_path(like)
    kept, state_treedef = jax.tree_util.tree_flatten_with_path(state)
    places: dict[int | None, list[int]] = {None: [], **{i: [] for i in range(len(matrices))}}
    for place, (path, leaf) in enumerate(kept):
        places[owner_of(path, leaf, matrices)].append(place)
    shared = {place: kept[place][1] for place in places[None]}
    others = [i for i, is_alone in enumerate(alone) if not is_alone]
    rest = sorted(place for owner in (None, *others) for place in places[owner])
    return [
        Part(inner, treedef, state_treedef, tuple(others), tuple(rest), {}),
        *(
            Part(inner, treedef, state_treedef, (i,), tuple(places[i]), shared)
            for i, is_alone in enumerate(alone)
            if is_alone
        ),
    ]


def _filled(treedef: Any, values: dict[int, Any]) -> Any:
    return treedef.unflatten([values.get(place) for place in range(treedef.num_leaves)])
