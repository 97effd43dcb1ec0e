"""Which device gets which matrices: an equal share of every stack, and the remainders one by one.

Each of D devices gets `⌊N / D⌋` of the N matrices of a stack, in order. The remainders of all
stacks are dealt out in rounds of at most one matrix per device, the most expensive first, each to
the device with the least work so far. No device gets more than one matrix above the mean, and
nothing is padded: the matrices of a round may differ in shape.

If the busiest device then has more than 1.1 of the mean work, cheap matrices fill the gaps: fewer
of them are divided evenly, `D` less at a time, and the others are dealt out one by one. It stays
as it was if that does not suffice either. More rounds take more memory, that of their largest
matrix on every device.

Matrices of a direction that consists of products are not dealt out, but shared by all devices, if
that makes a step shorter: remainders of whole stacks, the most expensive first, as many as give the
least work of the busiest device and exchange together. Without them the number of matrices (of
blocks, with `block_size`) bounds the number of devices with work.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np

Stacks = dict[str, jax.Array]

EXCHANGE = 16000.0
"""The cost of sharing a matrix `m × n`, `m ≤ n`, over `m²` and in the unit of `product_cost`.

Devices receive four to nine float32 numbers for each of `m²` in a step of Muon (in programs for
TPUs), and in the time of a byte one does some 500 FLOPs.
"""

BALANCED = 1.1
"""The work of the busiest device over the mean from which on cheap matrices are dealt out too."""

ROUNDS = 8
"""So many rounds at most, if these are dealt out: each is compiled on its own."""


@dataclasses.dataclass(frozen=True)
class Round:
    """At most one matrix per device."""

    kinds: tuple[str, ...]  # the stacks that the matrices come from
    kind: tuple[int, ...]  # per device, an index into `kinds`; `len(kinds)` for no matrix
    entry: tuple[int, ...]  # and the index into the remainder of that stack

    def entries(self, key: str, none: int) -> list[int]:
        """Which matrix of the remainder of a stack each device gets; `none` if it gets none."""
        stacks = [*self.kinds, None]  # the stack of each device's matrix
        pairs = zip(self.kind, self.entry, strict=True)
        return [entry if stacks[kind] == key else none for kind, entry in pairs]

    def owners(self, key: str) -> list[int]:
        """The devices that get matrices of a stack, in the order of these."""
        entries = self.entries(key, -1)
        devices = [device for device, entry in enumerate(entries) if entry >= 0]
        return sorted(devices, key=entries.__getitem__)


@dataclasses.dataclass(frozen=True)
class Shares:
    """How some stacks are divided among devices."""

    devices: int
    sizes: Mapping[str, int]  # per stack, the number of matrices
    even: Mapping[str, int]  # and how many of them, the first, are divided evenly
    rounds: tuple[Round, ...]
    shared: tuple[str, ...] = ()  # stacks whose remainders all devices share
    busiest: float = 1.0  # the work of the busiest device over the mean

    def split_stacks(self, stacks: Mapping[str, jax.Array]) -> tuple[Stacks, Stacks, Stacks]:
        """The evenly divided part of some stacks, and remainders to deal out and to share."""
        even = {k: x[: self.even[k]] for k, x in stacks.items() if self.even[k]}
        left = {k: x[self.even[k] :] for k, x in stacks.items() if len(x) > self.even[k]}
        shared = {key: left.pop(key) for key in self.shared}
        return even, left, shared

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
    shapes: Mapping[str, tuple[int, ...]],
    devices: int,
    divisible: Collection[str] = (),
    price: Callable[[int, int], float] = cost,
) -> Shares:
    """Divides stacks of shapes `(N, m, n)` among devices; matrices of some stacks are divisible."""
    prices = {key: price(*shape[1:]) for key, shape in shapes.items()}
    mean = sum(shape[0] * prices[key] for key, shape in shapes.items()) / devices
    to_split = [key for key in divisible if shapes[key][0] % devices]
    to_split.sort(key=lambda key: -prices[key])

    def dealt(
        split: Sequence[str], even: Mapping[str, int], at_once: bool = False
    ) -> tuple[float, Shares]:
        left = {key: shape[0] - even[key] for key, shape in shapes.items()}
        exchanged = EXCHANGE * sum(left.pop(key) * min(shapes[key][1:]) ** 2 for key in split)
        rounds, load = _dealt(left, prices, devices, at_once)
        # The work that all devices have alike: the mean of everything that is not dealt out.
        busiest = mean - sum(load) / devices + max(load)
        sizes = {key: shape[0] for key, shape in shapes.items()}
        shared = tuple(sorted(split))
        shares = Shares(devices, sizes, even, rounds, shared, busiest / mean if mean else 1.0)
        return busiest + exchanged, shares

    def balanced(split: Sequence[str]) -> tuple[float, Shares]:
        even = {key: shape[0] - shape[0] % devices for key, shape in shapes.items()}
        best = dealt(split, even)
        if best[1].busiest <= BALANCED:
            return best
        # In order where prices are equal: all processes of a mesh must divide alike.
        for key in sorted((key for key in shapes if key not in split), key=prices.__getitem__):
            for number in range(even[key], -1, -devices):
                even = {**even, key: number}
                candidate = dealt(split, even, at_once=True)
                if len(candidate[1].rounds) > ROUNDS:
                    return best
                if candidate[1].busiest <= BALANCED:
                    return candidate
        return best

    choices = (balanced(to_split[:number]) for number in range(len(to_split) + 1))
    return min(choices, key=lambda pair: pair[0])[1]


def _dealt(
    left: Mapping[str, int], prices: Mapping[str, float], devices: int, at_once: bool
) -> tuple[tuple[Round, ...], list[float]]:
    """Rounds of so many matrices of each stack, and the work of each device.

    As few rounds as possible, or (`at_once`) as little work as possible for the busiest device.
    """
    matrices = [(key, i) for key, number in left.items() for i in range(number)]
    matrices.sort(key=lambda item: -prices[item[0]])
    busy = [(0.0, device) for device in range(devices)]  # a heap
    by_device: list[list[tuple[str, int]]] = [[] for _ in busy]
    each = 1 if at_once else devices
    for start in range(0, len(matrices), each):
        items = matrices[start : start + each]
        least = [heapq.heappop(busy) for _ in items]
        for (load, device), item in zip(least, items, strict=True):
            by_device[device].append(item)
            heapq.heappush(busy, (load + prices[item[0]], device))
    rounds, numbers = [], {key: itertools.count() for key in left}
    for items in itertools.zip_longest(*by_device):
        # Anew, in the order of the rounds, in which updates come back.
        entries = {item: next(numbers[item[0]]) for item in sorted(filter(None, items))}
        kinds = tuple(dict.fromkeys(item[0] for item in items if item))
        kind = tuple(kinds.index(item[0]) if item else len(kinds) for item in items)
        rounds.append(Round(kinds, kind, tuple(entries.get(item, 0) for item in items)))
    return tuple(rounds), [load for load, _ in busy]
