"""A side channel through which transformations report how each parameter is treated.

`summarize` and the other tools have to work on any composition of transformations, and states hold
only arrays. So transformations record what they do while their `init` (or `update`) is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
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


def record_rank(x: Any, asked: int, rank: int, where: str) -> None:
    """Records the rank of matrices like `x`, and the one that was asked for."""
    record(RankRecord(tuple(x.shape[-2:]), f"rank {instead(rank, asked)} on the {where}"))


def instead(taken: int, asked: int) -> str:
    """A number, and the one that was asked for."""
    return f"{taken}" if taken == asked else f"{taken} instead of {asked}"


def record(event: Any) -> None:
    """Passes `event` to the enclosing `recording`, if any."""
    events = _records.get()
    if events is not None:
        events.append(event)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Collects the events that transformations record inside."""
    events: list[Any] = []
    token = _records.set(events)
    try:
        yield events
    finally:
        _records.reset(token)
