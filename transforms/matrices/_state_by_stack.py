"""The state of a transformation of stacks, cut into the parts of the stacks and what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

Stacks = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StateByStack:
    """A dict with the keys of the stacks has an entry for each; all other nodes are shared."""

    treedef: Any
    stacked: tuple[bool, ...]  # which nodes have an entry per stack
    parts: dict[str, tuple[list[Any], list[Any]]]  # per stack its entries, and what all share

    @classmethod
    def of(cls, state: Any, stacks: Stacks) -> StateByStack | None:
        """`None` if an array in the entry of a stack `(N, m, n)` lacks the first axis `N`."""

        def is_stacked(node: Any) -> bool:
            return isinstance(node, dict) and node.keys() == stacks.keys()

        nodes, treedef = jax.tree.flatten(state, is_leaf=is_stacked)
        split = cls(treedef, tuple(map(is_stacked, nodes)), {})
        split.parts.update(split.parts_of([*stacks], state))
        even = all(
            x.shape[:1] == stacks[key].shape[:1]
            for key, (own, _) in split.parts.items()
            for x in jax.tree.leaves(own)
        )
        return split if even else None

    def parts_of(self, keys: Sequence[str], state: Any) -> dict[str, tuple[list[Any], list[Any]]]:
        """The parts of a state that has entries for `keys`."""
        nodes = list(zip(self.treedef.flatten_up_to(state), self.stacked, strict=True))
        shared = [node for node, stacked in nodes if not stacked]
        return {key: ([node[key] for node, stacked in nodes if stacked], shared) for key in keys}

    def joined(self, parts: dict[str, tuple[list[Any], list[Any]]]) -> Any:
        """The inverse of `parts_of`."""
        entries = zip(*(own for own, _ in parts.values()), strict=True)
        shared = iter(next(iter(parts.values()))[1])
        return self.treedef.unflatten(
            [
                dict(zip(parts, next(entries), strict=True)) if stacked else next(shared)
                for stacked in self.stacked
            ]
        )

    def state_of(self, keys: Sequence[str]) -> Any:
        """The state with the entries for `keys` alone."""
        return self.joined({key: self.parts[key] for key in keys})
