"""Gradients and bounds for trajectories against NumPy float64 transcriptions of the papers.

Every case runs on a whole family of gradients at once (a batch of wide ones, tall, square, rank
deficient, one row, with a row and a column of zeros and steps without gradient), in float32 and in
float64. The gradients are exact in float32, so that what is compared is the work of the optimizer
alone. Bounds are `factor · condition · eps`, with the condition number of the method:

- Newton-Schulz: an iteration multiplies perturbations by at most `max |p'| = a`, so `condition`
  is the product of the first coefficients (485 for Muon's five steps);
- an exact polar factor: the ratio of the extreme singular values of the range;
- `(V + eps)^(-1/2) M`: with `E = O(machine eps · λ_max)` the error of `V`'s decomposition and `M`
  in the range of `V`, the error is at most `κ₊ · (λ_max / λ_min)^(1/2)`, where `κ₊` is the
  condition of `V + eps` on the range of `V` and `λ_min` belongs to the whole space;
- RACS adds and multiplies positive numbers: condition 1.

Where a condition number leaves less than a digit of float32, float64 alone is compared.

Gradients of one shape are one batch, and cases that differ in numbers alone run one program: decay
rates, damping, scales and periods are its data. A method's defaults run on all gradients; its other
programs on half of them each, in turns, or with CURVAX_ALL_CELLS on all. The
library's defaults are compared with the papers' numbers program by program.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import ALL_CELLS, program, scanned, share

STEPS = 24


def in_both_dtypes(
    cases: Iterable[str], in_float32: Iterable[str], program_of: Callable[[str], Any] = str
) -> Any:
    """Parametrizes by case and dtype: all in float64, in float32 those that differ in numerics.

    By default every other one. Cases of one program run in one worker.
    """
    pairs = [*((case, "float64") for case in cases), *((case, "float32") for case in in_float32)]
    grouped = [
        pytest.param(*pair, marks=pytest.mark.xdist_group(f"{program_of(pair[0])}, {pair[1]}"))
        for pair in share(pairs, of=2)
    ]
    return pytest.mark.parametrize(("case", "dtype"), grouped)


def _gradients() -> dict[str, np.ndarray]:
    """Gradients `(STEPS, ..., m, n)`, exact in float32; their scales jump by powers of two."""
    generator = np.random.default_rng(1)
    jumps = 2.0 ** (np.arange(STEPS) * 7 % 5 - 2)

    def normal(*shape: int) -> np.ndarray:
        entries = generator.standard_normal((STEPS, *shape)).astype(np.float32)
        return entries.astype(np.float64) * jumps.reshape(-1, *[1] * len(shape))

    def integers(*shape: int) -> np.ndarray:
        return generator.integers(-4, 5, shape).astype(np.float64)

    holes = normal(5, 9)
    holes[:, 2, :], holes[:, :, 5] = 0, 0
    holes[3], holes[10] = 0, 0
    return {
        "wide": normal(2, 5, 9),
        "tall": normal(11, 6),
        "square": normal(6, 6),
        "row": normal(1, 7),
        "rank 3": integers(STEPS, 11, 3) @ integers(3, 6) / 64,  # one row space throughout
        "holes": holes,
    }


GRADIENTS = _gradients()


# The library's leaves, and where in them the gradients are.
LEAVES = {
    "wide": np.concatenate([GRADIENTS["wide"], GRADIENTS["holes"][:, None]], axis=1),
    "tall": np.stack([GRADIENTS["tall"], GRADIENTS["rank 3"]], axis=1),
    "square": GRADIENTS["square"],
    "row": GRADIENTS["row"],
}


PLACES: dict[str, tuple[str, Any]] = {
    "wide": ("wide", slice(0, 2)),
    "tall": ("tall", 0),
    "square": ("square", ...),
    "row": ("row", ...),
    "rank 3": ("tall", 1),
    "holes": ("wide", 2),
}
FULL_RANK = {**LEAVES, "wide": LEAVES["wide"][:, :2], "tall": LEAVES["tall"][:, :1]}
HALVES = (("wide", "row"), ("tall", "square"))


def leaves_of(place: int, dtype: str) -> tuple[str, ...]:
    """What a method's program of this place runs on: the other half in the other dtype."""
    return tuple(LEAVES) if ALL_CELLS or place == 0 else HALVES[(place + (dtype == "float32")) % 2]


def names_in(leaves: Iterable[str]) -> list[str]:
    """The gradients that are in these leaves."""
    return [name for name, (leaf, _) in PLACES.items() if leaf in leaves]


def of(tree: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What belongs to a gradient, in a tree of all steps like the leaves."""
    leaf, place = PLACES[name]
    return tree[leaf][:, place]


@functools.cache
def compiled(factory: Callable[..., Any], settings: tuple[tuple[str, Any], ...]):
    """What `scanned` returns, for the arguments that are data."""

    def make(data: dict[str, Any]) -> Any:
        arguments = {**dict(settings), **data}
        if "period" in data:
            period, offset = arguments.pop("period"), arguments.pop("offset")
            refresh = dataclasses.replace(curvax.every(period), offset=offset)
            arguments["refresh"] = refresh
        return factory(**arguments)

    return scanned(make)


def trajectory_of(
    factory, gradients: dict[str, np.ndarray], dtype: str, data=None, **settings: Any
):
    """Directions and states of all steps, which come first, from the library."""
    given = {name: np.asarray(g, dtype) for name, g in gradients.items()}
    return compiled(factory, tuple(settings.items()))(given, data or {})


def program_of_step(transformation: Any) -> str:
    """What a step of a transformation computes."""
    g = np.zeros((2, 3), np.float32)
    return program(transformation.update, g, jax.eval_shape(transformation.init, g))


def expected_of(reference, gradient: np.ndarray, **arguments):
    """Directions and states of every step, from a transcription; batches matrix by matrix."""
    if gradient.ndim == 3:
        return reference(list(gradient), **arguments)
    runs = [reference(list(gradient[:, b]), **arguments) for b in range(gradient.shape[1])]
    directions = [np.stack(together) for together in zip(*(r[0] for r in runs), strict=True)]
    states = [
        {name: np.stack([state[name] for state in together]) for name in together[0]}
        for together in zip(*(r[1] for r in runs), strict=True)
    ]
    return directions, states


def spread(values: np.ndarray) -> float:
    """The ratio of the largest to the smallest along the last axis, of those beyond rounding."""
    largest = values.max(axis=-1, keepdims=True)
    smallest = np.where(values > 1e-12 * largest, values, np.inf).min(axis=-1, keepdims=True)
    return float(np.max(np.where(largest > 0, largest / smallest, 1.0)))


def machine_epsilon(dtype: str) -> float:
    return float(np.finfo(dtype).eps)


def says_something(condition: float, dtype: str) -> bool:
    return 16 * condition * machine_epsilon(dtype) < 0.1
