"""Which device gets which matrices: an equal share of every stack, and the remainders one by one.

Of a stack of N matrices each of D devices gets `⌊N / D⌋`, in order. The remainders of all stacks
are dealt out in rounds of at most one matrix per device, the most expensive first, each to the
device with the least work so far. No device gets more than one matrix above the mean, and nothing
is padded: the matrices of a round may differ in shape.

The number of matrices (of blocks, with `block_size`) bounds the number of devices with any work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Stacks = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Round:
    """At most one matrix per device."""

    kinds: tuple[str, ...]  # the stacks that the matrices come from
    kind: tuple[int, ...]  # per device, an index into `kinds`; `len(kinds)` for no matrix
    entry: tuple[int, ...]  # and the index into the remainder of that stack


@dataclasses.dataclass(frozen=True)
class Shares:
    """How some stacks are divided among devices."""

    devices: int
    each: Mapping[str, int]  # per stack, the number of matrices that every device gets
    rounds: tuple[Round, ...]

    def whole(self, key: str) -> int:
        """How many matrices of a stack are divided evenly; they come first."""
        return self.devices * self.each[key]

    def split(self, stacks: Mapping[str, jax.Array]) -> tuple[Stacks, Stacks]:
        """The evenly divided part of some stacks, and their remainders."""
        whole = {k: x[: self.whole(k)] for k, x in stacks.items() if self.each[k]}
        left = {k: x[self.whole(k) :] for k, x in stacks.items() if len(x) > self.whole(k)}
        return whole, left

    def joined(
        self, like: Stacks, whole: Stacks, rows: Sequence[jax.Array], place: Callable[..., Any]
    ) -> Stacks:
        """Joins stacks from their evenly divided parts and the flat rows of their remainders.

        Args:
          like: stacks with the resulting shapes and dtypes.
          whole: the evenly divided parts.
          rows: for each round `(devices, length)`, one flattened matrix per device.
          place: moves a matrix `(1, m, n)` to the sharding of its stack in `like`.
        """
        left: dict[str, dict[int, jax.Array]] = {key: {} for key in like}
        for r, row in zip(self.rounds, rows, strict=True):
            for device, (kind, entry) in enumerate(zip(r.kind, r.entry, strict=True)):
                if kind < len(r.kinds):
                    key = r.kinds[kind]
                    shape = (1, *like[key].shape[1:])
                    left[key][entry] = place(
                        row[device, : math.prod(shape)].reshape(shape), like[key]
                    )
        stacks = {}
        for key, x in like.items():
            parts = [whole[key]] if key in whole else []
            parts += [left[key][i] for i in sorted(left[key])]
            parts = [part.astype(x.dtype) for part in parts]
            stacks[key] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return stacks


def cost(rows: int, columns: int) -> float:
    """Relative cost of a matrix: products with both factors, and their decompositions."""
    return float(rows + columns) ** 3


def share(shapes: Mapping[str, tuple[int, ...]], devices: int) -> Shares:
    """Divides stacks of shapes `(N, m, n)` among devices."""
    each = {key: shape[0] // devices for key, shape in shapes.items()}
    left = [(key, i) for key, shape in shapes.items() for i in range(shape[0] % devices)]
    left.sort(key=lambda item: -cost(*shapes[item[0]][1:]))
    load = [0.0] * devices
    rounds = []
    for start in range(0, len(left), devices):
        items = left[start : start + devices]
        kinds = tuple(dict.fromkeys(key for key, _ in items))
        kind, entry = [len(kinds)] * devices, [0] * devices
        order = sorted(range(devices), key=load.__getitem__)
        for device, (key, i) in zip(order, items, strict=False):
            kind[device], entry[device] = kinds.index(key), i
            load[device] += cost(*shapes[key][1:])
        rounds.append(Round(kinds, tuple(kind), tuple(entry)))
    return Shares(devices, each, tuple(rounds))
