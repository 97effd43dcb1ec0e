"""Trajectories of the library against NumPy float64 transcriptions of the papers.

A case is a transformation of the library and its transcription. All of its matrices run in one
program, and every step is compared, with as many arrays of the state as the case names. Bounds are
`factor · condition · eps`, with the condition number of the method. Where that leaves less than a
digit, a matrix or a step is left out.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from tests.helpers import assert_close, program, scanned

Gradients = Mapping[str, Any]


class Case(NamedTuple):
    """Our transformation, or one from a period, and its transcription."""

    ours: Any
    theirs: Callable[..., Any]  # from the gradients of a matrix, and the period
    gradients: Gradients  # by name: one matrix `(m, n)`, or a batch, for each step
    condition: Any = 1.0  # a number, or one for each step, or from gradients and states of a matrix
    states: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    """Our arrays; their names, and conditions like that of the case, or None for the same."""

    periods: tuple[Any, ...] = (None,)
    start: int = 0  # steps left out
    factor: float = 16.0
    eps: float | None = None
    dtype: str = "float64"
    state_of: Callable[[Any, str], Any] = lambda states, name: states[name]
    with_state: bool = False  # which the transcription takes, for what was drawn
    offset: int = 0  # of refreshes, in the period


def assert_follows(case: Case, least: int | None = None) -> None:
    """Compares all matrices, or at least as many as this."""
    with jax.enable_x64(case.dtype == "float64"):
        compared = sum(_compared(case, period) for period in case.periods)
    number = sum(int(np.prod(np.shape(g)[1:-2])) for g in case.gradients.values())
    assert compared >= (number * len(case.periods) if least is None else least)


def _compared(case: Case, period: int | None) -> int:
    compared, value = 0, () if period is None else (period,)
    given = {name: np.asarray(np.stack(g), case.dtype) for name, g in case.gradients.items()}
    found, states = scanned(case.ours)(given, *value)
    for name, g in given.items():
        assert found[name].dtype == case.dtype
        state = case.state_of(states, name) if case.states or case.with_state else None
        given_too = (*value, state) if case.with_state else value
        for i in np.ndindex(g.shape[1:-2]):
            own = list(np.float64(g[:, *i]))
            expected, kept = case.theirs(own, *given_too)
            arrays = {"": (found[name][:, *i], expected, None)}
            for place, (theirs, condition) in case.states.items():
                x: Any = functools.reduce(getattr, place.split("."), state)
                arrays[place] = x[:, *i], [s[theirs] for s in kept], condition
            compared += _assert_same(case, (name, *i), own, kept, arrays)
        if isinstance(period, int) and state is not None:
            _assert_refreshed(state, period, case.offset, len(g))
    return compared


def _assert_same(case: Case, matrix: Any, own: Any, kept: Any, arrays: Any) -> bool:
    said = False
    for place, (x, y, condition) in arrays.items():
        condition = case.condition if condition is None else condition
        condition = condition(own, kept) if callable(condition) else condition
        eps = machine_epsilon(case.dtype) if case.eps is None else case.eps
        conditions = np.broadcast_to(condition, len(own))
        sharp = case.factor * conditions * eps < 0.1
        said |= not place and bool(sharp.all())
        for t in np.flatnonzero(sharp & (np.arange(len(own)) >= case.start)):
            pair = [np.sort(z[t]) if place.endswith("spectrum") else z[t] for z in (x, y)]
            where = (*matrix, place or "direction", f"step {t + 1}")  # for the message
            named = [{where: z} for z in pair]
            assert_close(*named, case.factor, condition=conditions[t], eps=eps)
    return said


def _assert_refreshed(state: Any, period: int, offset: int, steps: int) -> None:
    due = sum(t == 1 or (t - offset) % period == 0 for t in range(1, steps + 1))
    for place in ("left", "right", "subspace"):
        own = getattr(state, place, None)
        assert own is None or ((own.refreshes[-1] == due).all() and not own.rejected.any())


def by_period(factory: Callable[..., Any], **settings: Any) -> Any:
    return lambda period: factory(refresh=curvax.every(period), **settings)


def scheduled(values: np.ndarray) -> Any:
    """A schedule of these values; Optax counts its steps from 0."""
    return lambda count: jnp.asarray(values)[count]


def of_smaller(gradients: list[np.ndarray]) -> str:
    """Of a square matrix the left side, where some papers have the right one."""
    m, n = gradients[0].shape
    return "left" if m <= n else "right"


def machine_epsilon(dtype: str) -> float:
    return float(np.finfo(dtype).eps)


def spread(values: np.ndarray) -> float:
    """The ratio of the largest to the smallest along the last axis, of those beyond rounding."""
    largest = values.max(axis=-1, keepdims=True)
    smallest = np.where(values > 1e-12 * largest, values, np.inf).min(axis=-1, keepdims=True)
    return float(np.max(np.where(largest > 0, largest / smallest, 1.0)))


def program_of_step(transformation: Any) -> str:
    g = np.zeros((2, 3), np.float32)
    return program(transformation.update, g, jax.eval_shape(transformation.init, g))


def _hard_gradients() -> dict[str, np.ndarray]:
    """Gradients of 24 steps, exact in float32; those of one shape are a batch.

    Wide ones and one with a row and a column of zeros and steps without gradient; tall ones, of
    full rank and of rank 3; a square matrix and a row. Their scales jump by powers of two.
    """
    generator, steps = np.random.default_rng(1), 24
    jumps = 2.0 ** (np.arange(steps) * 7 % 5 - 2)

    def normal(*shape: int) -> np.ndarray:
        entries = generator.standard_normal((steps, *shape)).astype(np.float32)
        return entries.astype(np.float64) * jumps.reshape(-1, *[1] * len(shape))

    def integers(*shape: int) -> np.ndarray:
        return generator.integers(-4, 5, shape).astype(np.float64)

    holes = normal(5, 9)
    holes[:, 2, :], holes[:, :, 5] = 0, 0
    holes[3], holes[10] = 0, 0
    rank_3 = integers(steps, 11, 3) @ integers(3, 6) / 64  # one row space throughout
    return {
        "wide": np.stack([normal(5, 9), holes], axis=1),
        "tall": np.stack([normal(11, 6), rank_3], axis=1),
        "square": normal(6, 6),
        "row": normal(1, 7),
    }


HARD = _hard_gradients()
FULL_RANK = {**HARD, "wide": HARD["wide"][:, 0], "tall": HARD["tall"][:, 0]}
