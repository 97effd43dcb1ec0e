"""The layout of a distributed state, and its conversion from and to the state of one device.

The state of a stack holds arrays whose first axis is the stack's, and others, such as counts, which
every device has. Arrays of evenly divided stacks are sharded along their first axis. The state of a
matrix that is dealt out on its own is flattened into one buffer per dtype, padded to the longest of
its round: one array, sharded over the devices, holds matrices of different shapes. Arrays of
matrices that devices share are split along their longest axis.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._own_state import difference, kinds_of
from .._paths import is_box, is_hole, named_leaves
from .._recording import repeated
from .._stacks import StateSplit, init_each
from ._routes import padded
from ._shares import Round, cost, share

StackShapes = Mapping[str, jax.ShapeDtypeStruct]
Buffers = dict[str, jax.Array]


class DistributedState(NamedTuple):
    """State of `distribute`: per stack the arrays of all devices, and the arrays of matrices."""

    common: dict[str, Any]  # the state with holes for arrays of matrices
    even: dict[str, Any]  # the arrays of evenly divided stacks, sharded along their first axes
    dealt: tuple[Buffers, ...]  # per round and dtype (devices, length), sharded by row
    split: dict[str, Any]  # the arrays of matrices that all devices share


class BoxedState(DistributedState):
    """The state of parameters in Flax's boxes: a box too, for `nn.get_sharding`.

    In the state of a whole network, `nn.get_sharding` asks each `AxisMetadata` for its sharding,
    and replicates every array outside of one. This class becomes one (`boxed_like`).
    """

    def get_partition_spec(self) -> BoxedState:
        key: Any = next(iter(self.common))
        division = key.division
        return BoxedState(*division.layout.specs(division.axes))

    def get_sharding(self, mesh: Mesh) -> BoxedState:
        specs = self.get_partition_spec()
        return jax.tree.map(functools.partial(NamedSharding, mesh), specs)

    def unbox(self) -> DistributedState:
        return DistributedState(*self)

    def replace_boxed(self, state: DistributedState) -> BoxedState:
        return BoxedState(*state)


def boxed_like(params: Any) -> bool:
    """Whether parameters are in boxes, and so `BoxedState` is to be one."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: is_box(node) or is_hole(node))
    kinds = {kind for node in nodes if is_box(node) for kind in type(node).__mro__}
    boxes = [kind for kind in kinds if kind.__name__ == "AxisMetadata"]
    for kind in boxes:
        kind.register(BoxedState)
    return bool(boxes)


def is_divided(node: Any) -> bool:
    """Whether a node of a state is distributed over devices."""
    return isinstance(node, DistributedState)


class StackLayout:
    """The state of one stack `(N, m, n)`."""

    def __init__(self, state: Any, stack: jax.ShapeDtypeStruct):
        self.split = StateSplit.of(state, stack.shape[:1])
        self.matrix = jax.tree.map(  # the arrays of one matrix
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), self.split.parts(state)[0]
        )

    def packed(self, arrays: Any, lengths: Mapping[str, int]) -> Buffers:
        """The arrays of one matrix, each `(1, …)`, as buffers."""
        parts: dict[str, list[jax.Array]] = {dtype: [] for dtype in lengths}
        for x in jax.tree.leaves(arrays):
            parts[x.dtype.name].append(x.reshape(-1))
        zeros = {dtype: jnp.zeros(0, dtype) for dtype in lengths}
        return {k: padded(jnp.concatenate([*parts[k], zeros[k]]), n) for k, n in lengths.items()}

    def unpacked(self, buffers: Mapping[str, jax.Array]) -> Any:
        start = dict.fromkeys(buffers, 0)

        def taken(like: Any) -> jax.Array:
            begin = start[like.dtype.name]
            start[like.dtype.name] += like.size
            return buffers[like.dtype.name][begin : begin + like.size].reshape(like.shape)

        return jax.tree.map(taken, self.matrix)


class StateLayout:
    """How the state of a transformation of each of some stacks is distributed."""

    def __init__(
        self,
        init: Callable[[Any], Any],
        stacks: StackShapes,
        devices: int,
        divisible: Collection[str] = (),
        price: Callable[[int, int], float] = cost,
    ):
        """From the transformation's `init`, stacks `(N, m, n)`, and those that devices may share.

        `price` is the cost of a matrix.
        """
        with repeated():
            self.joined_shapes = jax.eval_shape(lambda like: init_each(init, like), dict(stacks))
        self.stacks = stacks
        self.shares = share({key: x.shape for key, x in stacks.items()}, devices, divisible, price)
        self.of = {key: StackLayout(self.joined_shapes[key], x) for key, x in stacks.items()}
        for key, x in stacks.items():
            with repeated():
                one = jax.eval_shape(init, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype))
            shapes = one, self.of[key].matrix
            alone, of_stack = ([(y.shape, y.dtype) for y in jax.tree.leaves(x)] for x in shapes)
            if [(shape, dtype) for shape, dtype in alone if shape] != of_stack:
                raise ValueError(
                    "the transformation's state depends on the number of matrices in a stack and "
                    "cannot be distributed. (quantize_state decides by size: give it "
                    "where=lambda place, leaf: leaf.ndim > 2.)"
                )
        self.shapes = jax.eval_shape(self.divided, self.joined_shapes)

    @property
    def held(self) -> float:
        """The bytes of matrices' state on each device, over an equal share of them."""

        def size(tree: Any) -> int:
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

        whole = sum(x.shape[0] * size(self.of[key].matrix) for key, x in self.stacks.items())
        return size(self.shapes[1:]) / whole if whole else 1.0

    def fits(self, state: Any, holders: int = 1) -> bool:
        """Whether `state` has the arrays of this layout, or one of `holders` equal parts of them.

        A step would take some states for other numbers of devices, and lose matrices.
        """
        even, dealt = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // holders, *x.shape[1:]), x.dtype),
            (self.shapes.even, self.shapes.dealt),
        )
        expected = self.shapes._replace(even=even, dealt=dealt)
        wanted, kinds = (kinds_of(named_leaves(x).present()) for x in (expected, state))
        return difference("state", wanted, kinds) is None

    def specs(self, axes: tuple[str, ...]) -> Any:
        """How each array of the state is sharded over mesh axes: a `DistributedState` of specs."""

        def along_longest(x: Any) -> P:
            axis = split_axis(x.shape, self.shares.devices)
            return P() if axis is None else P(*[None] * axis, axes)

        return DistributedState(
            jax.tree.map(lambda _: P(), self.shapes.common),
            jax.tree.map(lambda _: P(axes), self.shapes.even),
            jax.tree.map(lambda _: P(axes), self.shapes.dealt),
            jax.tree.map(along_longest, self.shapes.split),
        )

    def lengths(self, r: Round) -> dict[str, int]:
        """The length of a round's buffers, by dtype."""
        longest: Counter[str] = Counter()
        for key in r.owners:
            sizes: Counter[str] = Counter()
            for x in jax.tree.leaves(self.of[key].matrix):
                sizes[x.dtype.name] += x.size
            longest |= sizes  # the larger of both
        return dict(longest)

    def divided(self, states: Mapping[str, Any]) -> DistributedState:
        """The distributed form of the states of one device."""
        parts = {key: layout.split.parts(states[key]) for key, layout in self.of.items()}
        even = self.shares.even

        def entries_at(key: str, place: slice) -> Any:
            return jax.tree.map(lambda x: x[place], parts[key][0])

        dealt = []
        for r in self.shares.rounds:
            lengths = self.lengths(r)
            rows = [{dtype: jnp.zeros(n, dtype) for dtype, n in lengths.items()}]
            rows *= self.shares.devices
            for key, owners in r.owners.items():
                for i, device in enumerate(owners, r.start[key]):
                    rows[device] = self.of[key].packed(entries_at(key, slice(i, i + 1)), lengths)
            dealt.append(jax.tree.map(lambda *x: jnp.stack(x), *rows))
        return DistributedState(
            {key: common for key, (_, common) in parts.items()},
            {key: entries_at(key, slice(even[key])) for key in self.of if even[key]},
            tuple(dealt),
            {key: entries_at(key, slice(even[key], None)) for key in self.shares.shared},
        )

    def undivided(self, state: DistributedState) -> dict[str, Any]:
        """The states of one device; the inverse of `divided`."""
        parts = {key: [state.even[key]] if key in state.even else [] for key in self.of}
        for r, buffers in zip(self.shares.rounds, state.dealt, strict=True):
            for key, owners in r.owners.items():
                rows = [{dtype: x[device] for dtype, x in buffers.items()} for device in owners]
                parts[key] += map(self.of[key].unpacked, rows)
        for key, arrays in state.split.items():
            parts[key].append(arrays)
        joined = lambda *x: x[0] if len(x) == 1 else jnp.concatenate(x)  # noqa: E731
        return {
            key: layout.split.joined(jax.tree.map(joined, *parts[key]), state.common[key])
            for key, layout in self.of.items()
        }


def split_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """The axis along which an array of matrices that devices share is split: the longest but 0.

    `None` if the devices divide none; then each has the whole array.
    """
    lengths = {i: n for i, n in enumerate(shape) if i and n % devices == 0}
    return max(lengths, key=lambda i: (lengths[i], i), default=None)
