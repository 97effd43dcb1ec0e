"""The axes that a user specifies: `weight_dimension_numbers` in all its forms, by path.

An entry for many parameters, a pattern or a node, leaves alone those that lack its axes: `*/weight`
is about kernels, not about the vectors of norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._paths import check_patterns, is_hole, matches, path_names
from ._form import AxesEntry, MatrixAxes, as_matrix_axes
from ._names import Shapes


class Explicit(NamedTuple):
    """The axes specified for one parameter, and the pattern or place that specifies them."""

    axes: MatrixAxes | None
    by: str


def specified(
    spec: Any, params: Any, names: Sequence[str], shapes: Shapes
) -> dict[str, MatrixAxes | None]:
    """The entries of `weight_dimension_numbers` by path; None means "not a matrix".

    Raises:
      ValueError: naming the entry that does not fit the parameters.
    """
    if spec is None:
        return {}
    # A tree may be callable as well (a module); a function is a leaf that is not an entry.
    if callable(spec) and not all(map(_is_entry, jax.tree.leaves(spec, is_leaf=_is_entry))):
        spec = spec(params)
    if isinstance(spec, Mapping) and spec and all(map(_is_entry, spec.values())):
        explicit = _by_pattern(spec, names)
    else:
        explicit = _by_tree(spec, names)
    fitting = {name: entry.axes for name, entry in explicit.items() if _fits(name, entry, shapes)}
    _check_used(explicit, fitting, shapes)
    return fitting


def _is_entry(x: Any) -> bool:
    return is_hole(x) or isinstance(x, AxesEntry)


def _is_integer(x: Any) -> bool:
    """Whether it is an entry, or a tuple or list of axes in place of one."""
    axes = jax.tree.leaves(x, is_leaf=_is_entry) if type(x) in (tuple, list) else []
    return _is_entry(x) or (bool(axes) and all(isinstance(axis, int) for axis in axes))


def _by_pattern(spec: Mapping[Any, AxesEntry | None], names: Sequence[str]) -> dict[str, Explicit]:
    check_patterns("weight_dimension_numbers", map(str, spec), names)
    found = ((n, next((p for p in spec if matches(n, str(p))), ...)) for n in names)
    return {name: Explicit(_axes(spec[p]), str(p)) for name, p in found if p is not ...}


def _by_tree(spec: Any, names: Sequence[str]) -> dict[str, Explicit]:
    entries: dict[str, AxesEntry | None] = {}
    with_path = jax.tree_util.tree_leaves_with_path(spec, is_leaf=_is_integer)
    places = path_names([path for path, _ in with_path])
    for place, (_, entry) in zip(places, with_path, strict=True):
        if not _is_entry(entry):
            pair = _is_integer(entry) and len(entry) == 2
            hint = f" Write curvax.MatrixAxes({entry[0]}, {entry[1]})." if pair else ""
            raise ValueError(
                f"weight_dimension_numbers has {entry!r} at {place!r}; entries must be "
                "curvax.MatrixAxes, dimension numbers of optax.contrib's Muon or GaLore, or None."
                f"{hint}"
            )
        entries[place] = entry

    def covering(name: str) -> str | None:
        boxed = ("", name, f"{name}/value")
        return next((p for p in entries if p in boxed or name.startswith(f"{p}/")), None)

    above = {name: covering(name) for name in names}
    lacking = [n for n, p in above.items() if p is None]
    surplus = sorted(set(entries) - set(above.values()))
    if lacking or surplus:
        where = f"has no entry for {lacking[0]!r}" if lacking else f"has an entry at {surplus[0]!r}"
        raise ValueError(
            f"weight_dimension_numbers must have the structure of the parameters, but it {where}. "
            f"The parameters are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    return {n: Explicit(_axes(entries[p]), p) for n, p in above.items() if p is not None}


def _axes(entry: AxesEntry | None) -> MatrixAxes | None:
    return None if is_hole(entry) else as_matrix_axes(entry)  # pyright: ignore


def _fits(name: str, entry: Explicit, shapes: Shapes) -> bool:
    """Whether the parameter has the axes; an entry for it alone must fit, see `matrix_forms`."""
    if entry.axes is None or name not in shapes or entry.by in (name, f"{name}/value"):
        return True
    return entry.axes.exist_in(len(shapes[name]))


def _check_used(
    explicit: Mapping[str, Explicit], fitting: Mapping[str, Any], shapes: Shapes
) -> None:
    """Requires every entry to fit at least one of the parameters that it covers."""
    used = {explicit[name].by for name in fitting}
    for entry in explicit.values():
        if entry.axes is not None and entry.by not in used:
            covered = [
                f"{n!r} {shapes[n]}" for n, other in explicit.items() if other.by == entry.by
            ]
            shown = ", ".join(covered[:8]) + (", ..." if len(covered) > 8 else "")
            raise ValueError(
                f"weight_dimension_numbers: none of the parameters of {entry.by!r} has the axes "
                f"rows={entry.axes.rows} and columns={entry.axes.columns}; they are {shown}."
            )
