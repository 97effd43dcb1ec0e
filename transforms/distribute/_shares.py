"""Which device gets which matrices: an equal share of every stack, and the remainders one by one.

Each of D devices gets `⌊N / D⌋` of the N matrices of a stack, in order. The remainders of all
stacks are dealt out in rounds of at most one matrix per device, the most expensive first, each to
the device with the least work so far. No device gets more than one matrix above the mean, and
nothing is padded: the matrices of a round may differ in shape.

If the busiest device then has more than 1.1 of the mean work, cheap matrices fill the gaps: fewer
of them are divided evenly, `D` less at a time, and the others are dealt out one by one. It stays as
it was if that does not suffice either. Rounds take memory: their largest matrix on every device.

Matrices of a direction that consists of products are not dealt out, but shared by all devices, if
that makes a step shorter: remainders of whole stacks, the most expensive first, as many as give the
least work of the busiest device and exchange together. Without them the number of matrices (of
blocks, with `block_size`) bounds the number of devices with work.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

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


class Round(NamedTuple):
    """At most one matrix per device."""

    owners: Mapping[str, tuple[int, ...]]  # per stack, the devices that get its next matrices
    start: Mapping[str, int]  # and the place of the first of these in the stack

    def kinds(self, devices: int) -> np.ndarray:
        """Per device, an index into the stacks; their number where it gets no matrix."""
        kinds = np.full(devices, len(self.owners))
        for i, owners in enumerate(self.owners.values()):
            kinds[[*owners]] = i
        return kinds

    def places(self, key: str, devices: int) -> np.ndarray:
        """Per device, the place of its matrix in a stack; of the first where it gets none."""
        places = np.full(devices, self.start[key])
        places[[*self.owners[key]]] += np.arange(len(self.owners[key]))
        return places


class Shares(NamedTuple):
    """How some stacks are divided among devices."""

    devices: int
    even: Mapping[str, int]  # per stack, how many matrices, the first, are divided evenly
    rounds: tuple[Round, ...]
    shared: tuple[str, ...] = ()  # stacks whose remainders all devices share
    busiest: float = 1.0  # the work of the busiest device over the mean

    def devices_of(self, key: str, number: int) -> np.ndarray:
        """The device that owns each of a stack's matrices, in order; 0 where all share one."""
        owners = [*np.repeat(range(self.devices), self.even[key] // self.devices)]
        owners += [device for r in self.rounds for device in r.owners.get(key, ())]
        return np.array(owners + [0] * (number - len(owners)), int)


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
        rounds, load = _dealt(left, even, prices, devices, at_once)
        # The work that all devices have alike: the mean of everything that is not dealt out.
        busiest = mean - sum(load) / devices + max(load)
        shared = tuple(sorted(split))
        shares = Shares(devices, even, rounds, shared, busiest / mean if mean else 1.0)
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
    left: Mapping[str, int],
    even: Mapping[str, int],
    prices: Mapping[str, float],
    devices: int,
    at_once: bool,
) -> tuple[tuple[Round, ...], list[float]]:
    """Rounds of so many matrices of each stack, and the work of each device.

    As few rounds as possible, or (`at_once`) as little work as possible for the busiest device.
    """
    matrices = [key for key, number in left.items() for _ in range(number)]
    matrices.sort(key=lambda key: -prices[key])
    busy = [(0.0, device) for device in range(devices)]  # a heap
    by_round: list[dict[str, tuple[int, ...]]] = []
    dealt = [0] * devices  # to each device
    each = 1 if at_once else devices
    for first in range(0, len(matrices), each):
        keys = matrices[first : first + each]
        least = [heapq.heappop(busy) for _ in keys]
        for (load, device), key in zip(least, keys, strict=True):
            if dealt[device] == len(by_round):
                by_round.append({})
            owners = by_round[dealt[device]]
            owners[key] = (*owners.get(key, ()), device)
            dealt[device] += 1
            heapq.heappush(busy, (load + prices[key], device))
    rounds, start = [], Counter(even)
    for owners in by_round:
        rounds.append(Round(owners, {key: start[key] for key in owners}))
        start.update({key: len(devices) for key, devices in owners.items()})
    return tuple(rounds), [load for load, _ in busy]
