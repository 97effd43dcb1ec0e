"""The axes that a user specifies: `weight_dimension_numbers` in all its forms, by path.

An entry for many parameters, a pattern or a node, leaves alone those that lack its axes: `*/weight`
is about kernels, not about the vectors of norms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._paths import check_patterns, first_of, is_hole, matches, path_names
from ._form import AxesEntry, MatrixAxes, as_matrix_axes
from ._names import Shapes


def specified(
    spec: Any, params: Any, names: Sequence[str], shapes: Shapes
) -> dict[str, MatrixAxes | None]:
    """The entries of `weight_dimension_numbers` by path; None means "not a matrix"."""
    if spec is None:
        return {}
    # A tree may be callable as well (a module); a function is a leaf that is not an entry.
    if callable(spec) and not all(map(_is_entry, jax.tree.leaves(spec, is_leaf=_is_entry))):
        spec = spec(params)
    if isinstance(spec, Mapping) and spec and all(map(_is_entry, spec.values())):
        entries = {str(pattern): entry for pattern, entry in spec.items()}
        check_patterns("weight_dimension_numbers", entries, names)
        place_of = {name: next((p for p in entries if matches(name, p)), None) for name in names}
    else:
        entries = _entries_by_place(spec)
        covers = lambda p, n: p in ("", n, f"{n}/value") or n.startswith(f"{p}/")  # noqa: E731
        place_of = {name: next((p for p in entries if covers(p, name)), None) for name in names}
        _check_structure(entries, place_of)
    found: dict[str, MatrixAxes | None] = {}
    for place, entry in entries.items():
        axes = None if is_hole(entry) else as_matrix_axes(entry)
        covered = [name for name in names if place_of[name] == place]
        have = [
            n
            for n in covered
            if axes is None
            or place in (n, f"{n}/value")  # `matrix_forms` checks an entry for it alone
            or n not in shapes
            or axes.exist_in(len(shapes[n]))
        ]
        if covered and axes and not have:
            shown = first_of(f"{name!r} {shapes[name]}" for name in covered)
            raise ValueError(
                f"weight_dimension_numbers: none of the parameters of {place!r} has the axes "
                f"rows={axes.rows} and columns={axes.columns}; they are {shown}."
            )
        found |= dict.fromkeys(have, axes)
    return found


def _is_entry(x: Any) -> bool:
    return is_hole(x) or isinstance(x, AxesEntry)


def _is_integer(x: Any) -> bool:
    """Whether it is an entry, or a tuple or list of axes in place of one."""
    axes = jax.tree.leaves(x, is_leaf=_is_entry) if type(x) in (tuple, list) else []
    return _is_entry(x) or (bool(axes) and all(isinstance(axis, int) for axis in axes))


def _entries_by_place(spec: Any) -> dict[str, Any]:
    """The entries of a tree like the parameters, or of one that ends above them."""
    with_path = jax.tree_util.tree_leaves_with_path(spec, is_leaf=_is_integer)
    places = path_names([path for path, _ in with_path])
    entries = {place: entry for place, (_, entry) in zip(places, with_path, strict=True)}
    for place, entry in entries.items():
        if not _is_entry(entry):
            pair = _is_integer(entry) and len(entry) == 2
            hint = f" Write curvax.MatrixAxes({entry[0]}, {entry[1]})." if pair else ""
            raise ValueError(
                f"weight_dimension_numbers has {entry!r} at {place!r}; entries must be "
                "curvax.MatrixAxes, dimension numbers of optax.contrib's Muon or GaLore, or None."
                f"{hint}"
            )
    return entries


def _check_structure(entries: Mapping[str, Any], place_of: Mapping[str, str | None]) -> None:
    """Requires a tree of entries to have the structure of the parameters."""
    lacking = [name for name, place in place_of.items() if place is None]
    surplus = sorted(set(entries) - set(place_of.values()))
    if lacking or surplus:
        where = f"has no entry for {lacking[0]!r}" if lacking else f"has an entry at {surplus[0]!r}"
        raise ValueError(
            f"weight_dimension_numbers must have the structure of the parameters, but it {where}. "
            f"The parameters are {first_of(place_of)}."
        )
