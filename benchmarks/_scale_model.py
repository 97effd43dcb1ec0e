"""What dividing matrices among devices gives, on paper: the formulas behind the suite `scale`.

`N_s` matrices of shape `m_s × n_s` (blocks, where there is a `block_size`) are on `D` devices. Each
device owns `e_s = ⌊N_s / D⌋` of every shape. What is left, `l_s = N_s mod D`, is dealt out in `K =
⌈Σ l_s / D⌉` rounds of at most one matrix a device, the dearest first, by `(m + n)³`. With `b(m, n)`
bytes of state for a matrix, `f` factors of orders `d` and `g` bytes for a number of the gradient:

    state of a device            Σ e_s b(m_s, n_s) + Σ_k max b over round k
    eigendecompositions          Σ e_s f + f for every round in which it has a matrix
    seconds of a refresh         c Σ d³ over its factors, c from a decomposition that was timed
    bytes received in a step     2 B / D + 2 Σ_k S_k + (2 - 1 / D) R

where `B = g Σ e_s D m_s n_s` are the gradients of what is divided evenly, and `S_k = g Σ m n` over
the shapes of round k, each once: a device gets a matrix of each, of which one is its own. Gradients
go to their owners and updates come back. `R = g Σ l_s m_s n_s` are those of the rest that have
neither rows nor columns that `D` divides; they go to everybody, both ways, and are not in `S_k`.
This is for kernels cut along columns; other cuts are in `docs/distribution.md`. The average over
the batch is not counted. During a step a device has besides its part of parameters and gradients
`2 Σ_k S_k + 2 R`, gradients and updates.

So a refresh takes at least as long as the dearest matrix, and more devices than there are matrices
have nothing to do: blocks are the way out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import curvax

from ._trees import Shapes

Shape = tuple[int, int]

STACKED = curvax.MatrixRule(block_size=None, stack=True)
"""Matrices of one shape share an array, and none is cut into blocks."""


class Kind(NamedTuple):
    """A method as the model sees it."""

    make: Callable[..., Any]  # takes `matrices=`
    factors: Callable[[int, int], tuple[int, ...]]  # orders of what a refresh decomposes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of the device that has most."""

    matrices: int
    working: int  # devices that have any
    state: int
    decompositions: int
    cubes: float  # Σ d³ of its factors
    balance: float  # the mean of that over all devices, over it
    received: float
    transient: float  # gradients left over, and their updates


def blocks(shapes: dict[Shape, int], block_size: int | None) -> dict[Shape, int]:
    """Matrices, or the balanced blocks of at most so many rows and columns that they are cut in."""
    if block_size is None:
        return shapes
    found: Counter[Shape] = Counter()
    for shape, count in shapes.items():
        tiles = [math.ceil(size / block_size) for size in shape]
        m, n = (math.ceil(size / tile) for size, tile in zip(shape, tiles, strict=True))
        found[m, n] += count * math.prod(tiles)
    return dict(found)


def matrices_of(model: Shapes) -> dict[Shape, int]:
    """How many there are of every shape in attention and MLP."""
    return {shape: model.layers * n for shape, n in Counter(model.matrices().values()).items()}


@functools.cache
def bytes_of(kind: Kind, shape: Shape, dtype: Any) -> int:
    """The state of one matrix more."""

    def state(count: int) -> int:
        leaf = jax.ShapeDtypeStruct(shape, dtype)
        tree = {f"{i}": {"kernel": leaf} for i in range(count)}
        return curvax.state_bytes(kind.make(matrices=STACKED), tree)

    return state(2) - state(1)


def predict(kind: Kind, shapes: dict[Shape, int], devices: int, dtype: Any) -> Prediction:
    """The formulas of the module."""
    size = jnp.dtype(dtype).itemsize

    def own(shape: Shape) -> int:
        return bytes_of(kind, shape, dtype)

    def cubes(shape: Shape) -> float:
        return float(sum(d**3 for d in kind.factors(*shape)))

    even = {shape: count // devices for shape, count in shapes.items()}
    left = [shape for shape, count in shapes.items() for _ in range(count % devices)]
    left.sort(key=lambda shape: -(sum(shape) ** 3))
    rounds = [left[i : i + devices] for i in range(0, len(left), devices)]
    state = sum(n * own(shape) for shape, n in even.items())
    state += sum(max(map(own, dealt)) for dealt in rounds)
    # Within a round the dearest matrix goes to the device with the least work so far.
    load = [0.0] * devices
    work = [sum(n * cubes(shape) for shape, n in even.items())] * devices
    number = [sum(n * len(kind.factors(*shape)) for shape, n in even.items())] * devices
    for dealt in rounds:
        order = sorted(range(devices), key=load.__getitem__)
        for device, shape in zip(order, dealt, strict=False):
            load[device] += sum(shape) ** 3
            work[device] += cubes(shape)
            number[device] += len(kind.factors(*shape))
    evenly = sum(size * n * devices * math.prod(shape) for shape, n in even.items())
    cut = {shape: any(length % devices == 0 for length in shape) for shape in shapes}
    sent = size * sum(math.prod(s) for dealt in rounds for s in set(dealt) if cut[s])
    rest = size * sum(math.prod(shape) for shape in left if not cut[shape])
    total = sum(shapes.values())
    return Prediction(
        matrices=total,
        working=devices if any(even.values()) else min(total, devices),
        state=state,
        decompositions=max(number),
        cubes=max(work),
        balance=sum(work) / devices / max(work) if max(work) else 1.0,
        received=(2 * evenly / devices if devices > 1 else 0.0)
        + (2 * sent if devices > 1 else 0.0)
        + (2 - 1 / devices) * rest,
        transient=2 * (sent + rest) if devices > 1 else 0.0,
    )
