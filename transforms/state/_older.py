"""States of older formats, taken over into the present one.

| format | what the next one changed |
|---|---|
| 1 | a factor, an eigenbasis and a subspace have one array `counts` in place of three or four; they have `damping` and `proxy` only with a policy that uses them, `error` only with an iterative solver |
| 2 | the field `root` of a factor is called `inverse_root` |
| 3 | the guard's `skipped` is one of its `counts`; there are more counters, at the end |

All arrays keep their meaning, so a conversion renames and joins. Codes of storages did change: a
state with them has to start anew.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from .._paths import named_leaves
from ._format import STATE_FORMAT
from ._portable import by_parameter, place_state
from ._traced import Traced, traced

Arrays = dict[str, Any]  # by path

COUNTERS = ("checks", "refreshes", "indefinite", "rejected", "skipped")  # in their order
ADVICE = "Start with optimizer.init(params) in its place; parameters are not affected."


def convert_state(optimizer: Any, params: Any, old: Any, description: Any) -> Any:
    """Takes over a state that an older version of curvax saved.

    Args:
      optimizer: the transformation that will use the state, made by the same call as the old one.
      params: its parameters, or their shapes.
      old: the state, restored from its checkpoint without a target; of one device, or portable.
      description: what `describe_state` of the older version said, as read from its file.

    Returns:
      The state of the optimizer. Counters that older versions did not have start at 0.

    Raises:
      ValueError: if it is not an older format, or a part cannot be taken over; the message names
        the first such array.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((2, 3))}}
      >>> optimizer = curvax.scale_by_muon()
      >>> state = optimizer.init(params)  # of format 3, whose arrays are the same here
      >>> old = [{"count": state[0].count + 7, "mu": params}]
      >>> curvax.convert_state(optimizer, params, old, {"curvax_state_format": 3})[0].count
      Array(7, dtype=int32)
    """
    found = description.get("curvax_state_format") if isinstance(description, dict) else None
    if not (isinstance(found, int) and 1 <= found < STATE_FORMAT):
        raise ValueError(
            f"description: curvax_state_format must be 1 to {STATE_FORMAT - 1}, an older format; "
            f"got {found!r}. A state of format {STATE_FORMAT} needs no conversion: see place_state."
        )
    arrays = named_leaves(old).present()
    for convert in CONVERSIONS[found - 1 :]:
        arrays = convert(arrays)
    whole = traced(optimizer, params)
    portable = named_leaves(by_parameter(whole.stacks, whole.joined))
    taken, used = {}, set()
    for name, like in portable.present().items():
        source, array = _source(name, like, arrays, whole)
        used.add(source)
        taken[name] = _fitted(name, like, array)
    left = [name for name in arrays if name not in used and not _may_go(name, found)]
    if left:
        raise ValueError(
            f"old: nothing here corresponds to {left[0]!r}, {len(left)} of {len(arrays)} arrays of "
            f"format {found}. The optimizer must be made by the same call as the old one. {ADVICE}"
        )
    return place_state(optimizer, params, portable.rebuild(taken))


# One format to the next


def _counters_joined(arrays: Arrays) -> Arrays:
    """1 to 2: the counters of a factor, a basis or a subspace are one array."""
    found: Arrays = {}
    for name, x in arrays.items():
        node, _, field = name.rpartition("/")
        if field not in COUNTERS or f"{node}/refreshes" not in arrays:
            found[name] = x
        elif field == "refreshes":
            names = [f"{node}/{counter}" for counter in COUNTERS]
            own = [jnp.asarray(arrays[key]) for key in names if key in arrays]
            found[f"{node}/counts"] = jnp.stack(own, axis=-1)
    return found


def _roots_renamed(arrays: Arrays) -> Arrays:
    """2 to 3: `root` beside a statistic is `inverse_root`, with codes below it."""

    def renamed(name: str) -> str:
        for place in re.finditer(r"/root(?=/|$)", name):
            node = name[: place.start()]
            if any(other.startswith(f"{node}/statistic") for other in arrays):
                return f"{node}/inverse_root{name[place.end() :]}"
        return name

    return {renamed(name): x for name, x in arrays.items()}


def _guards_counted(arrays: Arrays) -> Arrays:
    """3 to 4: the guard of a matrix view counts `skipped` among others."""
    found: Arrays = {}
    for name, x in arrays.items():
        name = re.sub(r"(/counts(?:/.*)?)/value$", r"\1", name)  # the box of the counters
        guard = re.fullmatch(r"(.*/)?inner/skipped/(.*)", name)
        if guard:
            name, x = f"{guard[1] or ''}inner/counts/{guard[2]}", jnp.asarray(x)[..., None]
        found[name] = x
    return found


CONVERSIONS: tuple[Callable[[Arrays], Arrays], ...] = (
    _counters_joined,
    _roots_renamed,
    _guards_counted,
)


# The old array for each of the present state


def _source(name: str, like: Any, arrays: Arrays, whole: Traced) -> tuple[str, Any]:
    """The path of an old array, and what of it belongs to the parameter; None if there is none."""
    if name in arrays:
        return name, arrays[name]
    for place, key, names in _stacked(name, whole):
        if place in arrays:
            own = [member for member in names if _named(place, key, member) not in arrays]
            sizes = dict(names)
            start = 0
            for member in own:
                if _named(place, key, member) == name:
                    return place, arrays[place][start : start + sizes[member]]
                start += sizes[member]
    return name, None


def _stacked(name: str, whole: Traced) -> Iterator[tuple[str, str, dict[str, int]]]:
    """The paths that an entry has in a stacked state, the stack's key and its members."""
    for stacks in whole.stacks:
        for stack in stacks:
            for member, _ in stack.members:
                if f"/{member}/" in f"{name}/":
                    place = f"{name}/".replace(f"/{member}/", f"/{stack.key}/").removesuffix("/")
                    yield place, stack.key, dict(stack.members)


def _named(place: str, key: str, member: str) -> str:
    return f"{place}/".replace(f"/{key}/", f"/{member}/").removesuffix("/")


def _fitted(name: str, like: Any, array: Any) -> Any:
    """The array, with counters that it lacks at 0."""
    found = None if array is None else jnp.asarray(array)
    if "counts" in name.split("/") and found is not None and found.shape[:-1] == like.shape[:-1]:
        missing = max(0, like.shape[-1] - found.shape[-1])
        found = jnp.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, missing)])
    if found is None or (found.shape, found.dtype) != (like.shape, like.dtype):
        given = "nothing" if found is None else f"{found.dtype}{[*found.shape]}"
        raise ValueError(
            f"old has {given} for {name!r}, where this optimizer has {like.dtype}{[*like.shape]}. "
            f"The optimizer must be made by the same call as the old one. {ADVICE}"
        )
    return found


def _may_go(name: str, found: int) -> bool:
    """Whether the present format leaves an array out where nothing uses it."""
    return found == 1 and name.rpartition("/")[2] in ("damping", "proxy", "error")
