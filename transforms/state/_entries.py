"""Which parameters each array of an optimizer's state belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from .._counts import Counts
from .._paths import is_hole, named_leaves
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
    shapes = [None if is_hole(x) else jnp.shape(x) for x in named.leaves]

    def is_whole(node: Any) -> bool:
        """Whether `node` is one parameter's entry in a tree like the parameters."""
        return is_hole(node) or isinstance(node, Coded)

    def filled(node: Any) -> Any:
        """`node` with a hole for each parameter where it has one for several."""

        def fill(x: Any, own: Any) -> Any:
            return jax.tree.map(lambda _: x, own, is_leaf=is_hole) if is_hole(x) else x

        try:
            return jax.tree.map(fill, node, params, is_leaf=is_whole)
        except ValueError:  # no tree like the parameters
            return node

    def moments(node: Any) -> list[Any] | None:
        """The entries of a tree like the parameters, perhaps with holes; of another one none."""
        leaves, treedef = jax.tree.flatten(node, is_leaf=is_whole)
        if treedef != named.treedef and any(map(is_hole, leaves)):
            leaves, treedef = jax.tree.flatten(filled(node), is_leaf=is_whole)
        fits = treedef == named.treedef and all(
            is_whole(x) or jnp.shape(x) == shape for x, shape in zip(leaves, shapes, strict=True)
        )
        return leaves if fits else None

    def of_moment(path: Any, node: Any) -> Iterator[Entry]:
        for name, entry in zip(named.names, moments(node) or (), strict=True):
            for inner_path, leaf in jax.tree_util.tree_leaves_with_path(entry):
                full = "/".join(filter(None, (place_of(path), name, place_of(inner_path))))
                if not is_hole(leaf):
                    yield Entry(full, _field(path, inner_path), leaf, ((name, None),))

    def of_stored(path: Any, node: Any) -> Iterator[Entry]:
        owners = _owners(path)
        for inner_path, leaf in jax.tree_util.tree_leaves_with_path(node):
            full = (*path, *inner_path)
            own = owners if leaf.ndim else ()
            members = whole.packed.get(place_of(full))
            if members is not None:
                own = tuple((name, slice(i, i + 1)) for i, name in enumerate(members))
            yield Entry(place_of(full), _field(path, inner_path), leaf, own)

    def of_counts(path: Any, node: Any) -> Iterator[Entry]:
        members = whole.packed.get(place_of((*path, VALUE)))
        owners = _owners(path)
        if members is not None:
            owners = tuple((name, slice(i, i + 1)) for i, name in enumerate(members))
        place = path[:-1] if path[-1:] == (COUNTS,) else path  # by the counters
        yield Entry(place_of(place), _field(path), node.value, owners, node.names)

    def is_moment(node: Any) -> bool:
        return not is_view(node) and moments(node) is not None

    def is_unit(node: Any) -> bool:
        return _is_counts(node) or _is_stored(node) or is_moment(node)

    def entries(path: Any, node: Any) -> Iterator[Entry]:
        if _is_counts(node):
            return of_counts(path, node)
        return of_moment(path, node) if is_moment(node) else of_stored(path, node)

    units = jax.tree_util.tree_leaves_with_path(whole.joined, is_leaf=is_unit)
    return [entry for path, node in units for entry in entries(path, node)]


def _is_counts(node: Any) -> bool:
    return isinstance(node, Counts)


def _is_stored(node: Any) -> bool:
    """Whether it is the stored form of matrices."""
    return type(node).__module__.rpartition(".")[0] == Coded.__module__.rpartition(".")[0]


def _owners(path: tuple[Any, ...]) -> tuple[tuple[str, slice | None], ...]:
    """The parameters of the stack that a path leads through, with their slices."""
    for key in path:
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
