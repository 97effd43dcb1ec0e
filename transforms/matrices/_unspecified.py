"""The error that lists all parameters whose axes the rule cannot tell, to paste and to choose from.

Numbered layers share an entry: `block_*/conv/kernel` stands for all of them, where the pattern
matches nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from .._paths import matches
from ._form import MatrixAxes
from ._names import Shapes
from ._readings import Readings

_SHOWN = 5


def unspecified(
    unclear: Mapping[str, Readings], shapes: Shapes, names: Collection[str]
) -> ValueError:
    """The error for the parameters `unclear`; `names` are the paths of all parameters."""
    listed = [f"{name!r} {shapes[name]}" for name in unclear]
    if len(listed) > _SHOWN:
        listed = [*listed[:_SHOWN], f"{len(listed) - _SHOWN} more"]
    which = f"parameter {listed[0]}" if len(listed) == 1 else f"parameters {', '.join(listed)}"
    lines = []
    for pattern, members in _patterns(unclear, names).items():
        shape = shapes[members[0]]
        first, *others = unclear[members[0]]
        lines.append(f"    {pattern!r}: {_pasted(first.axes)},  # {shape}: {first.meaning}")
        lines += [f"    # or {_pasted(other.axes)},  # {other.meaning}" for other in others]
    return ValueError(
        f"the rule cannot tell the matrix axes of the {which}. Say which is right, as "
        "weight_dimension_numbers=; axes that are neither rows nor columns are batch axes, such as "
        "scanned layers, and None instead of MatrixAxes sends a parameter to AdamW:\n"
        + "\n".join(["{", *lines, "}"])
    )


def _patterns(unclear: Mapping[str, Readings], names: Collection[str]) -> dict[str, list[str]]:
    """The parameters that an entry can stand for, by the pattern of the entry."""
    alike: dict[tuple[str, object], list[str]] = {}
    for name, readings in unclear.items():
        pattern = re.sub(r"\d+", "*", name)
        alike.setdefault((pattern, tuple(r.axes for r in readings)), []).append(name)
    entries: dict[str, list[str]] = {}
    for (pattern, _), members in alike.items():
        if len(members) > 1 and {name for name in names if matches(name, pattern)} == {*members}:
            entries[pattern] = members
        else:
            entries |= {name: [name] for name in members}
    return entries


def _pasted(axes: MatrixAxes) -> str:
    return f"curvax.MatrixAxes(rows={axes.rows}, columns={axes.columns})"
