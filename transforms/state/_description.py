"""Reading the result of `describe_state`, which a file may have changed.

`STATE_FORMAT` grows whenever the same call gives a state with other arrays, or with arrays of
another meaning (`docs/checkpoints.md`); a test enforces it.
"""

from __future__ import annotations

from typing import Any

from .._validate import shown
from ._traced import Stack

STATE_FORMAT = 1


def checked(description: Any) -> dict[str, Any]:
    """The description, if it is one of a state of this format.

    Raises:
      ValueError: if it is not; it names the entry of another type.
    """
    given = description if isinstance(description, dict) else {}
    found = given.get("curvax_state_format")
    if type(found) is int and found != STATE_FORMAT:
        age = "an older" if found < STATE_FORMAT else "a later"
        raise ValueError(
            f"description: the checkpoint has state format {found}, from {age} version of curvax; "
            f"this version reads format {STATE_FORMAT}. Install that version, or start with "
            "optimizer.init(params)."
        )
    wrong = next((key for key, fits in _ENTRIES.items() if not fits(given.get(key))), None)
    if wrong is not None:
        entry = f", whose entry {wrong!r} is {shown(given[wrong])}" if wrong in given else ""
        raise ValueError(
            "description: expected the result of curvax.describe_state, got "
            f"{str(description)[:80]!r}{entry}."
        )
    return given


def stacks_in(description: Any) -> list[list[Stack]]:
    """The stacks of each matrix view of a description.

    Raises:
      ValueError: if it is not a description of a state of this format.
    """
    return [
        [Stack(key, tuple((name, count) for name, count in members)) for key, members in view]
        for view in checked(description)["stacks"]
    ]


def _are_texts(entry: Any) -> bool:
    return isinstance(entry, list) and all(isinstance(x, str) for x in entry)


def _are_texts_by_name(entry: Any) -> bool:
    return isinstance(entry, dict) and _are_texts([*entry, *entry.values()])


def _are_stacks(entry: Any) -> bool:
    def are_pairs(x: Any, fits: Any) -> bool:
        return isinstance(x, list) and all(
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and isinstance(pair[0], str)
            and fits(pair[1])
            for pair in x
        )

    def are_members(x: Any) -> bool:
        return are_pairs(x, lambda count: type(count) is int and count > 0)

    return isinstance(entry, list) and all(are_pairs(view, are_members) for view in entry)


_ENTRIES = {
    "curvax_state_format": lambda entry: type(entry) is int,
    "arrays": _are_texts_by_name,
    "matrices": _are_texts_by_name,
    "empty": _are_texts,
    "parts": _are_texts,
    "stacks": _are_stacks,
}
"""Whether an entry has the type of one of `describe_state`."""
