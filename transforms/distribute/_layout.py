"""The layout of a distributed state, and its conversion from and to the state of one device.

The state of a transformation on stacks holds scalars, and arrays whose first axis is a stack's.
Arrays of evenly divided stacks are sharded along that axis. The state of a matrix that is dealt out
on its own is flattened into one buffer per dtype, padded to the longest of its round: one array,
sharded over the devices, holds matrices of different shapes. Arrays of matrices that devices share
are cut along their longest axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._keys import members_of
from .._recording import recording
from ._cut import spec_of
from ._shares import share

Stacks = Mapping[str, jax.ShapeDtypeStruct]
Buffers = dict[str, jax.Array]


class DistributedState(NamedTuple):
    """State of `distribute`."""

    whole: Any  # the state of the evenly divided stacks, sharded along their first axes
    singles: tuple[Buffers, ...]  # per round and dtype (devices, length), sharded by row
    cut: tuple[jax.Array, ...]  # the state of matrices that all devices share, but for scalars


def is_divided(node: Any) -> bool:
    """Whether a node of a state is distributed over devices."""
    return isinstance(node, DistributedState)


class Part(NamedTuple):
    """The state for some of the matrices."""

    leaves: list[Any]
    owners: list[str | None]  # the stack that each leaf belongs to; None if all share it
    treedef: Any

    def own(self, leaves: Any) -> list[Any]:
        """Of the leaves of such a state, those that belong to matrices."""
        return [x for x, owner in zip(leaves, self.owners, strict=True) if owner is not None]

    def scalars(self, leaves: Any) -> list[Any]:
        """Those that all matrices share."""
        return [x for x, owner in zip(leaves, self.owners, strict=True) if owner is None]

    def state(self, own: Iterable[Any], scalars: Iterable[Any]) -> Any:
        """The state of these leaves."""
        own, scalars = iter(own), iter(scalars)
        return self.treedef.unflatten([next(scalars if o is None else own) for o in self.owners])


class StateLayout:
    """How the state of a transformation on some stacks is distributed."""

    def __init__(
        self, init: Callable[[Any], Any], stacks: Stacks, devices: int, cut: Collection[str] = ()
    ):
        """From the transformation's `init`, stacks `(N, m, n)`, devices, and what they may cut."""
        shares = share({key: x.shape for key, x in stacks.items()}, devices, cut)

        def part(sizes: Mapping[str, int]) -> Part:
            like = {
                key: jax.ShapeDtypeStruct((size, *stacks[key].shape[1:]), stacks[key].dtype)
                for key, size in sizes.items()
            }
            with recording(), members_of({}):  # only for the shapes
                found = jax.eval_shape(init, like)
            pairs, treedef = jax.tree_util.tree_flatten_with_path(found)
            owners = [_owner(path, stacks) for path, _ in pairs]
            return Part([leaf for _, leaf in pairs], owners, treedef)

        self.stacks, self.shares = stacks, shares
        self.all = part({key: x.shape[0] for key, x in stacks.items()})
        self.joined_shapes = self.all.treedef.unflatten(self.all.leaves)  # of one device
        self.whole = part({key: shares.whole(key) for key, each in shares.each.items() if each})
        kinds = dict.fromkeys(key for r in shares.rounds for key in r.kinds)
        self.single = {key: part({key: 1}) for key in kinds}
        self.cut = part({key: stacks[key].shape[0] - shares.whole(key) for key in shares.cut})
        self._check_parts()

    def _check_parts(self) -> None:
        """Requires the state for some of the matrices to be a part of the state for all.

        Raises:
          ValueError: if it has other arrays.
        """

        def dtypes(part: Part, key: str) -> list[Any]:
            return [x.dtype for x, o in zip(part.leaves, part.owners, strict=True) if o == key]

        for part in (self.whole, self.cut, *self.single.values()):
            for key in filter(None, set(part.owners)):
                if dtypes(part, key) != dtypes(self.all, key):
                    raise ValueError(
                        "the transformation's state depends on the number of matrices in a stack "
                        "and cannot be distributed. (quantize_state decides by size: give it "
                        "where=lambda place, leaf: leaf.ndim > 2.)"
                    )

    def fits(self, state: DistributedState, holders: int = 1) -> bool:
        """Whether `state` has the arrays of this layout, or one of `holders` equal parts of them.

        A step would take some states for other numbers of devices, and lose matrices.
        """

        def parts(first: int, *rest: int) -> tuple[int, ...]:
            return (first // holders, *rest)

        whole = [((*x.shape,), x.dtype) for x in jax.tree.leaves(state.whole)]
        singles = [{d: x.shape for d, x in buffers.items()} for buffers in state.singles]
        devices = self.shares.devices
        return (
            whole == [(parts(*x.shape) if x.ndim else (), x.dtype) for x in self.whole.leaves]
            and singles
            == [
                {d: parts(devices, length) for d, length in self.lengths(r.kinds).items()}
                for r in self.shares.rounds
            ]
            and [(x.shape, x.dtype) for x in state.cut]
            == [(x.shape, x.dtype) for x in self.cut.own(self.cut.leaves)]
        )

    def specs(self, axes: tuple[str, ...]) -> Any:
        """How each array of the state is sharded over mesh axes: a `DistributedState` of specs."""
        whole: Any = [P(axes) if x.ndim else P() for x in self.whole.leaves]
        singles: Any = [dict.fromkeys(self.lengths(r.kinds), P(axes)) for r in self.shares.rounds]
        devices = self.shares.devices
        cut: Any = [spec_of(x.shape, axes, devices) for x in self.cut.own(self.cut.leaves)]
        return DistributedState(self.whole.treedef.unflatten(whole), tuple(singles), tuple(cut))

    def packed(self, leaves: list[jax.Array], lengths: Mapping[str, int]) -> Buffers:
        """One matrix's arrays of the state, each `(1, …)`, as buffers."""
        parts: dict[str, list[jax.Array]] = {dtype: [] for dtype in lengths}
        for leaf in leaves:
            parts[leaf.dtype.name].append(leaf.reshape(-1))
        buffers = {}
        for dtype, length in lengths.items():
            flat = jnp.concatenate([*parts[dtype], jnp.zeros(0, dtype)])
            buffers[dtype] = jnp.pad(flat, (0, length - flat.size))
        return buffers

    def unpacked(self, key: str, buffers: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The inverse of `packed`."""
        leaves, start = [], dict.fromkeys(buffers, 0)
        for leaf in self.single[key].own(self.single[key].leaves):
            dtype, size = leaf.dtype.name, math.prod(leaf.shape)
            begin = start[dtype]
            leaves.append(buffers[dtype][begin : begin + size].reshape(leaf.shape))
            start[dtype] = begin + size
        return leaves

    def lengths(self, kinds: tuple[str, ...]) -> dict[str, int]:
        """The length of a round's buffers, by dtype."""
        longest: dict[str, int] = {}
        for key in kinds:
            own: dict[str, int] = {}
            for leaf in self.single[key].own(self.single[key].leaves):
                own[leaf.dtype.name] = own.get(leaf.dtype.name, 0) + math.prod(leaf.shape)
            longest = {d: max(own.get(d, 0), longest.get(d, 0)) for d in {**longest, **own}}
        return longest

    def scalars(self, whole: Any) -> list[jax.Array]:
        """The arrays that all matrices share, from the state of the evenly divided stacks."""
        return self.whole.scalars(jax.tree.leaves(whole))

    def divided(self, state: Any) -> DistributedState:
        """The distributed form of a state of one device."""
        leaves = self.all.treedef.flatten_up_to(state)
        pairs = list(zip(leaves, self.all.owners, strict=True))
        evenly = [
            x if owner is None else x[: self.shares.whole(owner)]
            for x, owner in pairs
            if owner is None or self.shares.each[owner]
        ]
        singles = []
        for r in self.shares.rounds:
            lengths = self.lengths(r.kinds)
            rows = []
            for kind, entry in zip(r.kind, r.entry, strict=True):
                if kind == len(r.kinds):
                    rows.append({d: jnp.zeros(size, d) for d, size in lengths.items()})
                    continue
                key = r.kinds[kind]
                place = self.shares.whole(key) + entry
                own = [x[place : place + 1] for x, owner in pairs if owner == key]
                rows.append(self.packed(own, lengths))
            singles.append(jax.tree.map(lambda *x: jnp.stack(x), *rows))
        cut = [x[self.shares.whole(o) :] for x, o in pairs if o in self.shares.cut]
        return DistributedState(self.whole.treedef.unflatten(evenly), tuple(singles), tuple(cut))

    def joined(self, state: DistributedState) -> Any:
        """The state of one device; the inverse of `divided`."""
        whole = list(zip(jax.tree.leaves(state.whole), self.whole.owners, strict=True))
        columns: dict[str, list[list[jax.Array]]] = {
            key: [[x] for x, owner in whole if owner == key] for key in self.stacks
        }
        left: dict[tuple[str, int], list[jax.Array]] = {}
        for r, buffers in zip(self.shares.rounds, state.singles, strict=True):
            for device, (kind, entry) in enumerate(zip(r.kind, r.entry, strict=True)):
                if kind < len(r.kinds):
                    own = {dtype: x[device] for dtype, x in buffers.items()}
                    left[r.kinds[kind], entry] = self.unpacked(r.kinds[kind], own)
        for key, entry in sorted(left, key=lambda item: item[1]):
            columns[key] = columns[key] or [[] for _ in left[key, entry]]
            for parts, x in zip(columns[key], left[key, entry], strict=True):
                parts.append(x)
        owners = [owner for owner in self.cut.owners if owner is not None]
        for key in self.shares.cut:
            own = [[x] for x, owner in zip(state.cut, owners, strict=True) if owner == key]
            whole_of = columns[key] or [[] for _ in own]
            columns[key] = [[*parts, *x] for parts, x in zip(whole_of, own, strict=True)]
        arrays = {
            key: iter([x[0] if len(x) == 1 else jnp.concatenate(x) for x in parts])
            for key, parts in columns.items()
        }
        scalars = iter(self.scalars(state.whole))
        return self.all.treedef.unflatten(
            [next(scalars if owner is None else arrays[owner]) for owner in self.all.owners]
        )


def _owner(path: tuple[Any, ...], stacks: Stacks) -> str | None:
    """The stack that a leaf of a state belongs to; `None` if all share it."""
    keys = (getattr(key, "key", None) for key in path)
    return next((key for key in keys if key in stacks), None)
