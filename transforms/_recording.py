"""A side channel through which transformations report how each parameter is treated.

`summarize` and the other tools have to work on any composition of transformations, and states hold
only arrays. So transformations record what they do while their `init` (or `update`) is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_records: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("records", default=None)


class Meaning(NamedTuple):
    """What arrays of a state mean where names, shapes and dtypes do not tell, for checkpoints."""

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
    """What most of a direction's work is: "products", which devices can share, or anything else."""

    kind: str


def record_rank(x: Any, asked: int, rank: int, where: str) -> None:
    """Records the rank of matrices like `x`, and the one that was asked for."""
    record(RankRecord(tuple(x.shape[-2:]), f"rank {instead(rank, asked)} on the {where}"))


def instead(taken: int, asked: int) -> str:
    """A number, and the one that was asked for."""
    return f"{taken}" if taken == asked else f"{taken} instead of {asked}"


class Key(str):
    """A key of a dict in a state, which says in `init` what its entry is, for `recording`.

    The structure of a state keeps it, so the tools that trace `init` read it from there.
    """

    about: Any = None  # a `Group` of the matrix view
    division: Any = None  # a `Division` of `distribute`


def known(keys: Iterable[str]) -> list[Key]:
    """These keys as `Key`s."""
    return [key if isinstance(key, Key) else Key(key) for key in keys]


def is_recording() -> bool:
    """Whether somebody listens."""
    return _records.get() is not None


def record(event: Any) -> None:
    """Passes `event` to the enclosing `recording`, if any."""
    events = _records.get()
    if events is not None:
        events.append(event)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Keeps what is traced inside from whoever listens: it is traced for its shapes alone."""
    with recording():
        yield


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Collects the events that transformations record inside."""
    events: list[Any] = []
    token = _records.set(events)
    try:
        yield events
    finally:
        _records.reset(token)
