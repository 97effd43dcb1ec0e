"""Which device gets which matrices: an equal share of every stack, and the remainders one by one.

Each of D devices gets `⌊N / D⌋` of the N matrices of a stack, in order. The remainders of all
stacks are dealt out in rounds of at most one matrix per device, the most expensive first, each to
the device with the least work so far. No device gets more than one matrix above the mean, and
nothing is padded: the matrices of a round may differ in shape.

Matrices of a direction that consists of products are not dealt out, but shared by all devices, if
that makes a step shorter: remainders of whole stacks, the most expensive first, as many as give the
least work of the busiest device and exchange together. Without them the number of matrices (of
blocks, with `block_size`) bounds the number of devices with work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Stacks = dict[str, jax.Array]

EXCHANGE = 16000.0
"""The cost of sharing a matrix `m × n`, `m ≤ n`, over `m²` and in the unit of `product_cost`.

Devices receive four to nine float32 numbers for each of `m²` in a step of Muon (in programs for
TPUs), and in the time of a byte one does some 500 FLOPs.
"""


@dataclasses.dataclass(frozen=True)
class Round:
    """At most one matrix per device."""

    kinds: tuple[str, ...]  # the stacks that the matrices come from
    kind: tuple[int, ...]  # per device, an index into `kinds`; `len(kinds)` for no matrix
    entry: tuple[int, ...]  # and the index into the remainder of that stack

    def entries(self, key: str, none: int) -> list[int]:
        """Which matrix of the remainder of a stack each device gets; `none` if it gets none."""
        pairs = zip(self.kind, self.entry, strict=True)
        return [entry if key in self.kinds[kind : kind + 1] else none for kind, entry in pairs]

    def owners(self, key: str) -> list[int]:
        """The devices that get matrices of a stack, in the order of these."""
        entries = self.entries(key, -1)
        own = [device for device, entry in enumerate(entries) if entry >= 0]
        return sorted(own, key=entries.__getitem__)


@dataclasses.dataclass(frozen=True)
class Shares:
    """How some stacks are divided among devices."""

    devices: int
    sizes: Mapping[str, int]  # per stack, the number of matrices
    even: Mapping[str, int]  # and how many of them, the first, are divided evenly
    rounds: tuple[Round, ...]
    shared: tuple[str, ...] = ()  # stacks whose remainders all devices share

    def parts(self, stacks: Mapping[str, jax.Array]) -> tuple[Stacks, Stacks, Stacks]:
        """The evenly divided part of some stacks, and remainders to deal out and to share."""
        even = {k: x[: self.even[k]] for k, x in stacks.items() if self.even[k]}
        left = {k: x[self.even[k] :] for k, x in stacks.items() if len(x) > self.even[k]}
        shared = {key: left.pop(key) for key in self.shared}
        return even, left, shared

    def joined(
        self,
        like: Stacks,
        even: Stacks,
        rounds: Sequence[Stacks],
        shared: Stacks,
        place: Callable[..., Any],
    ) -> Stacks:
        """Joins stacks from their parts.

        Args:
          like: stacks with the resulting shapes and dtypes.
          even: the evenly divided parts.
          rounds: the matrices of each round, as parts of their stacks.
          shared: the remainders that all devices share.
          place: moves some matrices to the sharding of their stack in `like`.
        """
        stacks = {}
        for key, x in like.items():
            parts = [even[key]] if key in even else []
            parts += [place(found[key], x) for found in rounds if key in found]
            parts += [place(shared[key], x)] if key in shared else []
            parts = [part.astype(x.dtype) for part in parts]
            stacks[key] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return stacks

    def devices_of(self, key: str) -> np.ndarray:
        """The device that owns each matrix of a stack, in order; 0 where all share one."""
        owners, even = np.zeros(self.sizes[key], int), self.even[key]
        owners[:even] = np.repeat(np.arange(self.devices), even // self.devices)
        for r in self.rounds:
            for device, entry in enumerate(r.entries(key, -1)):
                if entry >= 0:
                    owners[even + entry] = device
        return owners


def cost(rows: int, columns: int) -> float:
    """Relative cost of a matrix: products with both factors, and their decompositions."""
    return float(rows + columns) ** 3


def product_cost(rows: int, columns: int) -> float:
    """The FLOPs of five iterations of Newton-Schulz, for work that consists of products."""
    m, n = sorted((rows, columns))
    return 10.0 * m**2 * (2 * n + m)


def share(
    shapes: Mapping[str, tuple[int, ...]], devices: int, divisible: Collection[str] = ()
) -> Shares:
    """Divides stacks of shapes `(N, m, n)` among devices; matrices of some stacks are divisible."""
    sizes = {key: shape[0] for key, shape in shapes.items()}
    even = {key: size - size % devices for key, size in sizes.items()}
    price = product_cost if divisible else cost
    prices = {key: price(*shape[1:]) for key, shape in shapes.items()}
    mean = sum(shape[0] * prices[key] for key, shape in shapes.items()) / devices
    to_split = [key for key in divisible if shapes[key][0] % devices]
    to_split.sort(key=lambda key: -prices[key])

    def shared(split: Sequence[str]) -> tuple[float, Shares]:
        left = {key: shape[0] % devices for key, shape in shapes.items()}
        exchanged = EXCHANGE * sum(left.pop(key) * min(shapes[key][1:]) ** 2 for key in split)
        rounds, load = _dealt(left, prices, devices)
        # The work that all devices have alike: the mean of everything that is not dealt out.
        alike = mean - sum(load) / devices
        return alike + max(load) + exchanged, Shares(
            devices, sizes, even, rounds, tuple(sorted(split))
        )

    found = (shared(to_split[:number]) for number in range(len(to_split) + 1))
    return min(found, key=lambda pair: pair[0])[1]


def _dealt(
    left: Mapping[str, int], prices: Mapping[str, float], devices: int
) -> tuple[tuple[Round, ...], list[float]]:
    """Rounds of so many matrices of each stack, and the work of each device."""
    matrices = [(key, i) for key, number in left.items() for i in range(number)]
    matrices.sort(key=lambda item: -prices[item[0]])
    load = [0.0] * devices
    rounds = []
    for start in range(0, len(matrices), devices):
        items = matrices[start : start + devices]
        kinds = tuple(dict.fromkeys(key for key, _ in items))
        kind, entry = [len(kinds)] * devices, [0] * devices
        order = sorted(range(devices), key=load.__getitem__)
        for device, (key, i) in zip(order, items, strict=False):
            kind[device], entry[device] = kinds.index(key), i
            load[device] += prices[key]
        rounds.append(Round(kinds, tuple(kind), tuple(entry)))
    return tuple(rounds), load
