"""A side channel by which `init` functions say what they do with each parameter.

`summarize` and its relatives need to know how an optimizer, however it was composed, treats each
parameter. States hold arrays alone, so the transformations tell it while their `init` runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

_records: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("records", default=None)


def record(event: Any) -> None:
    """Hands `event` to the enclosing `recording`, if there is one."""
    events = _records.get()
    if events is not None:
        events.append(event)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Collects what the `init` functions that run inside record."""
    events: list[Any] = []
    token = _records.set(events)
    try:
        yield events
    finally:
        _records.reset(token)
