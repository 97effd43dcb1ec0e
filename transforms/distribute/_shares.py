"""Which device has which matrices: as many of every stack as all can have, the rest one by one.

Of a stack of N matrices on D devices each device has `⌊N / D⌋`, in the stack's order. What is left
of all stacks is dealt out in rounds of at most one matrix a device, the dearest first, each to the
device with the least work so far. So no device has more than one matrix beyond the mean in number,
and no stack is padded: the matrices of a round may have different shapes.

The number of matrices (blocks, with `block_size`) bounds the number of devices that have any work.
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
    """At most one matrix for every device."""

    kinds: tuple[str, ...]  # the stacks that the matrices are of
    kind: tuple[int, ...]  # for every device the place in `kinds`; their number if it has none
    entry: tuple[int, ...]  # and the place among what is left of that stack


@dataclasses.dataclass(frozen=True)
class Shares:
    """What every device has of some stacks."""

    devices: int
    each: Mapping[str, int]  # matrices of every stack that each device has
    rounds: tuple[Round, ...]

    def whole(self, key: str) -> int:
        """How many matrices of a stack are divided evenly; they come first in it."""
        return self.devices * self.each[key]

    def split(self, stacks: Mapping[str, jax.Array]) -> tuple[Stacks, Stacks]:
        """What of some stacks is divided evenly, and what is left."""
        whole = {k: x[: self.whole(k)] for k, x in stacks.items() if self.each[k]}
        left = {k: x[self.whole(k) :] for k, x in stacks.items() if len(x) > self.whole(k)}
        return whole, left

    def joined(
        self, like: Stacks, whole: Stacks, rows: Sequence[jax.Array], place: Callable[..., Any]
    ) -> Stacks:
        """Stacks from both parts, of which the second is put together in flat rows.

        Args:
          like: stacks with the shapes and dtypes wanted.
          whole: what is divided evenly.
          rows: for every round `(devices, length)`, the matrices end to end.
          place: brings a matrix of a row `(1, m, n)` to where its stack in `like` lies.
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
    """Relative cost of a matrix: products with factors of both orders, their decompositions."""
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
