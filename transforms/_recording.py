"""A side channel through which transformations report how each parameter is treated.

`summarize` and the other tools work on any composition of transformations, and states hold only
arrays. So transformations record what they do while their `init` (or `update`) is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

REPEATED = object()

_records: contextvars.ContextVar[Any] = contextvars.ContextVar("records", default=None)


class Meaning(NamedTuple):
    """The meaning of arrays whose names, shapes and dtypes do not tell it, for checkpoints."""

    text: str


class PerParameter(NamedTuple):
    """Arrays of a state whose first axis is that of these parameters."""

    names: tuple[str, ...]
    arrays: tuple[Any, ...]


class RankRecord(NamedTuple):
    """The rank of matrices of a shape."""

    shape: tuple[int, int]
    text: str


class Work(NamedTuple):
    """The kind of a direction's work: "products", which devices can share, or anything else."""

    kind: str


def record_rank(x: Any, asked: int, rank: int, where: str) -> None:
    """Records the rank of matrices like `x`, and the one that was asked for."""
    record(RankRecord(tuple(x.shape[-2:]), f"rank {instead(rank, asked)} on the {where}"))


def instead(taken: int, asked: int) -> str:
    """A number, and the one that was asked for."""
    return f"{taken}" if taken == asked else f"{taken} instead of {asked}"


class Key(str):
    """A key of a dict in a state, which describes its entry in `init`, for `recording`.

    The structure of a state keeps it, so the tools that trace `init` read it from there.
    """

    about: Any  # a `Group` of the matrix view
    division: Any  # a `Division` of `distribute`

    def __new__(cls, key: str, about: Any = None, division: Any = None) -> Key:
        new = super().__new__(cls, key)
        new.about, new.division = about, division
        return new


def is_recording() -> bool:
    """Whether a `recording` is open."""
    return isinstance(_records.get(), list)


def record(event: Any) -> None:
    """Passes `event` to the enclosing `recording`, if any."""
    events = _records.get()
    if isinstance(events, list):
        events.append(event)


def is_repeated() -> bool:
    """Whether `init` runs in `repeated`."""
    return _records.get() is REPEATED


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """The context variable has this value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def repeated() -> contextlib.AbstractContextManager[None]:
    """Runs `init` again, for its shapes or values alone: it records and checks nothing."""
    return holding(_records, REPEATED)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Collects the events that transformations record inside."""
    events: list[Any] = []
    with holding(_records, events):
        yield events
