"""Which parameters each array of an optimizer's state belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from .._counts import Counts
from .._paths import NamedLeaves, is_hole, named_leaves
from ..distribute._meshes import unsharded
from ..matrices._view import Group
from ..storage._codec import Coded
from ._traced import Traced, is_view, place_of, traced

COUNTS, VALUE = GetAttrKey("counts"), GetAttrKey("value")  # a field of `Counts`, and its array


class Entry(NamedTuple):
    """One array of a state and the parameters that own it."""

    place: str
    field: str
    leaf: jax.ShapeDtypeStruct
    owners: tuple[tuple[str, slice | None], ...]  # with their slices of a shared first axis
    names: tuple[str, ...] = ()  # counters along the last axis

    @property
    def places(self) -> tuple[str, ...]:
        """Its path in the state, or one for each of its counters."""
        named = ("/".join(filter(None, (self.place, name))) for name in self.names)
        return tuple(named) or (self.place,)

    def parts(self, array: Any) -> dict[str, Any]:
        """The values of `array` at each of `places`."""
        if not self.names:
            return {self.place: array}
        array = unsharded(array)
        return {place: array[..., i] for i, place in enumerate(self.places)}


def entries_of(optimizer: Any, params: Any) -> list[Entry]:
    """Every array of the optimizer's state on one device, with its owners."""
    return entries_in(traced(optimizer, params), params)


def owned_entries(whole: Traced, params: Any) -> list[Entry]:
    """`entries_in`, if every owner is one of `params`.

    Raises:
      ValueError: if a wrapper gives the optimizer parameters under other paths.
    """
    entries, names = entries_in(whole, params), named_leaves(params).names
    for owner in (owner for entry in entries for owner, _ in entry.owners):
        if owner not in names:
            raise ValueError(
                "optimizer: a wrapper, such as optax.flatten or optax.lookahead, gives the inner "
                f"optimizer another tree than params: it has an array at {owner!r}, and the paths "
                f"of params are {', '.join(names[:8])}{', ...' * (len(names) > 8)}. Pass the inner "
                "optimizer, with the tree and the state that it gets."
            )
    return entries


def entries_in(whole: Traced, params: Any) -> list[Entry]:
    """`entries_of`, from the traced state."""
    named = named_leaves(params)

    def moments(node: Any) -> Any:
        return None if is_view(node) else _arrays_by_name(node, named, params)

    def is_unit(node: Any) -> bool:
        return isinstance(node, Counts) or _is_stored(node) or moments(node) is not None

    found: list[Entry] = []
    for path, node in jax.tree_util.tree_leaves_with_path(whole.joined, is_leaf=is_unit):
        if isinstance(node, Counts):
            owners = _owners(whole, (*path, VALUE), node.value)
            place = path[:-1] if path[-1:] == (COUNTS,) else path  # by the counters
            value: Any = node.value
            found.append(Entry(place_of(place), _field(path), value, owners, node.names))
        elif (own := moments(node)) is not None:
            found += _of_moments(path, own)
        else:
            for inner, leaf in jax.tree_util.tree_leaves_with_path(node):
                full = (*path, *inner)
                owners = _owners(whole, full, leaf)
                found.append(Entry(place_of(full), _field(path, inner), leaf, owners))
    return found


def _arrays_by_name(node: Any, named: NamedLeaves, params: Any) -> dict[str, Any] | None:
    """The entries of a tree like the parameters, perhaps with holes; of another one none."""
    leaves, treedef = jax.tree.flatten(node, is_leaf=_is_one_entry)
    if treedef != named.treedef and any(map(is_hole, leaves)):
        leaves, treedef = jax.tree.flatten(_filled(node, params), is_leaf=_is_one_entry)
    fits = treedef == named.treedef and all(
        _is_one_entry(x) or (not is_hole(own) and jnp.shape(x) == jnp.shape(own))
        for x, own in zip(leaves, named.leaves, strict=True)
    )
    return dict(zip(named.names, leaves, strict=True)) if fits else None


def _is_one_entry(node: Any) -> bool:
    """Whether `node` is one parameter's entry in a tree like the parameters."""
    return is_hole(node) or isinstance(node, Coded)


def _filled(node: Any, params: Any) -> Any:
    """`node` with a hole for each parameter where it has one for several."""

    def fill(x: Any, own: Any) -> Any:
        return jax.tree.map(lambda _: x, own, is_leaf=is_hole) if is_hole(x) else x

    try:
        return jax.tree.map(fill, node, params, is_leaf=_is_one_entry)
    except ValueError:  # no tree like the parameters
        return node


def _of_moments(path: tuple[Any, ...], moments: dict[str, Any]) -> Iterator[Entry]:
    """The arrays of moments by parameter."""
    for name, entry in moments.items():
        for inner, leaf in jax.tree_util.tree_leaves_with_path(entry):
            full = "/".join(filter(None, (place_of(path), name, place_of(inner))))
            if not is_hole(leaf):
                yield Entry(full, _field(path, inner), leaf, ((name, None),))


def _is_stored(node: Any) -> bool:
    """Whether it is the stored form of matrices."""
    return type(node).__module__.rpartition(".")[0] == Coded.__module__.rpartition(".")[0]


def _owners(
    whole: Traced, path: tuple[Any, ...], leaf: Any
) -> tuple[tuple[str, slice | None], ...]:
    """The parameters along an array's first axis, or of the stack of its path, with slices."""
    packed = whole.packed.get(place_of(path))
    if packed is not None:
        return tuple((name, slice(i, i + 1)) for i, name in enumerate(packed))
    for key in path if leaf.ndim else ():
        group = getattr(getattr(key, "key", None), "about", None)
        if isinstance(group, Group):
            return tuple((form.parameter, place) for form, place in group.slices())
    return ()


def _field(path: tuple[Any, ...], stored: tuple[Any, ...] = ()) -> str:
    """The innermost field on the path to a unit of a state, and those of its stored form."""
    return "/".join((*_field_names(path)[-1:], *_field_names(stored))) or "state"


def _field_names(path: tuple[Any, ...]) -> list[str]:
    """The fields of tuples on a path."""
    return [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey) and k.name != "value"]
