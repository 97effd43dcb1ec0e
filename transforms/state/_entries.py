"""Which parameters each array of an optimizer's state belongs to."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from .._counts import Counts
from .._paths import NamedLeaves, first_of, is_hole, named_leaves
from ..distribute._meshes import unsharded
from ..storage._codec import Coded
from ._traced import Traced, is_view, place_of, stack_of


class Entry(NamedTuple):
    """One array of a state and the parameters that own it."""

    place: str
    field: str
    leaf: jax.ShapeDtypeStruct
    owners: tuple[tuple[str, slice | None], ...]  # with their slices of a shared first axis
    names: tuple[str, ...] = ()  # counters along the last axis

    def values_by_place(self, array: Any) -> dict[str, Any]:
        """The values of `array` by their path in the state: one, or one for each counter."""
        if not self.names:
            return {self.place: array}
        array = unsharded(array)
        places = ("/".join(filter(None, (self.place, name))) for name in self.names)
        return {place: array[..., i] for i, place in enumerate(places)}


def owned_entries(whole: Traced, params: Any) -> list[Entry]:
    """`entries_in`, which must have no owners but `params`."""
    entries, names = entries_in(whole, params), named_leaves(params).names
    for owner in (owner for entry in entries for owner, _ in entry.owners):
        if owner not in names:
            raise ValueError(
                "optimizer: a wrapper, such as optax.flatten or optax.lookahead, gives the inner "
                f"optimizer another tree than params: it has an array at {owner!r}, and the paths "
                f"of params are {first_of(names)}. Pass the inner optimizer, with the tree and the "
                "state that it gets."
            )
    return entries


def entries_in(whole: Traced, params: Any) -> list[Entry]:
    """Every array of an optimizer's state on one device, with its owners."""
    named = named_leaves(params)

    def moments(node: Any) -> dict[str, Any] | None:
        is_other = is_view(node) or isinstance(node, Counts)
        return None if is_other else _arrays_by_name(node, named, params)

    def is_unit(node: Any) -> bool:
        room = type(node).__module__.rpartition(".")[0]
        is_stored = room == Coded.__module__.rpartition(".")[0]
        return isinstance(node, Counts) or is_stored or moments(node) is not None

    entries: list[Entry] = []
    for path, node in jax.tree_util.tree_leaves_with_path(whole.undivided, is_leaf=is_unit):
        if (by_name := moments(node)) is not None:
            for name, entry in by_name.items():
                for inner, leaf in jax.tree_util.tree_leaves_with_path(entry):
                    place = "/".join(filter(None, (place_of(path), name, place_of(inner))))
                    entries.append(Entry(place, _field(path, inner), leaf, ((name, None),)))
            continue
        names = node.names if isinstance(node, Counts) else ()
        for inner, leaf in jax.tree_util.tree_leaves_with_path(node):
            full = place = (*path, *inner)
            if names:  # they stand in the place of the field `counts`
                place = path[:-1] if path[-1:] == (GetAttrKey("counts"),) else path
            owners = _owners(whole, full, leaf)
            entries.append(Entry(place_of(place), _field(path, inner), leaf, owners, names))
    return entries


def _arrays_by_name(node: Any, named: NamedLeaves, params: Any) -> dict[str, Any] | None:
    """The entries of a tree like the parameters, perhaps with holes; of another one none."""

    def filled(x: Any, param: Any) -> Any:  # a hole may stand for several parameters
        return jax.tree.map(lambda _: x, param, is_leaf=is_hole) if is_hole(x) else x

    leaves, treedef = jax.tree.flatten(node, is_leaf=_is_one_entry)
    if treedef != named.treedef and any(map(is_hole, leaves)):
        try:
            node = jax.tree.map(filled, node, params, is_leaf=_is_one_entry)
        except ValueError:  # no tree like the parameters
            return None
        leaves, treedef = jax.tree.flatten(node, is_leaf=_is_one_entry)
    fits = treedef == named.treedef and all(
        _is_one_entry(x) or (not is_hole(param) and jnp.shape(x) == jnp.shape(param))
        for x, param in zip(leaves, named.leaves, strict=True)
    )
    return dict(zip(named.names, leaves, strict=True)) if fits else None


def _is_one_entry(node: Any) -> bool:
    return is_hole(node) or isinstance(node, Coded)


def _owners(
    whole: Traced, path: tuple[Any, ...], leaf: Any
) -> tuple[tuple[str, slice | None], ...]:
    """The parameters along an array's first axis, or of the stack of its path, with slices."""
    packed = whole.packed.get(place_of(path))
    if packed is not None:
        return tuple((name, slice(i, i + 1)) for i, name in enumerate(packed))
    for key in (getattr(entry, "key", None) for entry in path if leaf.ndim):
        if group := getattr(key, "about", None):
            places = (place for _, place in stack_of(key).slices())
            names = (form.parameter for form in group.members)
            return tuple(zip(names, places, strict=True))
    return ()


def _field(path: tuple[Any, ...], stored: tuple[Any, ...] = ()) -> str:
    """The innermost field on the path to a unit of a state, and those of its stored form."""
    outer, inner = (
        [key.name for key in keys if isinstance(key, GetAttrKey) and key.name != "value"]
        for keys in (path, stored)
    )
    return "/".join((*outer[-1:], *inner)) or "state"
