"""How an optimizer treats each parameter, and how large its state is.

These functions trace `optimizer.init` abstractly: they compute and allocate nothing, and work for
abstract parameters of a model of any size and for any composition of transformations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._counts import Counts
from .._guard import GuardRecord
from .._paths import is_hole, named_leaves
from .._recording import recording
from ..distribute._distribute import DivisionRecord
from ..matrices._axes import MatrixForm
from ..matrices._routing import RoutingRecord
from ..matrices._view import CopyRecord, MatrixViewState, ViewRecord
from ..storage._codec import Coded
from ..storage._storage import StorageRecord
from ..subspace._rank import RankRecord
from ._portable import portable_state


def state_bytes(optimizer: Any, params: Any) -> int:
    """The size in bytes of the optimizer's state for `params`, by `jax.eval_shape`.

    Args:
      optimizer: any Optax transformation.
      params: the parameters, or their `jax.ShapeDtypeStruct`s.

    Example:
      >>> import jax, jax.numpy as jnp, optax, curvax
      >>> params = {"kernel": jax.ShapeDtypeStruct((8192, 28672), jnp.bfloat16)}
      >>> curvax.state_bytes(curvax.racs(0.1), params)
      147472
    """
    return sum(map(_bytes, jax.tree.leaves(jax.eval_shape(optimizer.init, params))))


def state_of(optimizer: Any, params: Any, state: Any, path: str) -> dict[str, Any]:
    """The entries of an optimizer's state that belong to one parameter.

    Args:
      optimizer: the transformation that made `state`.
      params: the parameters (or their shapes) for which it was made.
      state: the state.
      path: path of the parameter, such as "block_0/mlp/kernel".

    Returns:
      Arrays by their path in the state. The first axis runs over the parameter's matrices (batch,
      heads, blocks). Step counters and other entries that all parameters share are left out.

    Raises:
      ValueError: if there is no such parameter; the message lists the paths.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"a": {"kernel": jnp.ones((2, 3))}, "b": {"kernel": jnp.ones((2, 3))}}
      >>> optimizer = curvax.muon(0.1)
      >>> entries = curvax.state_of(optimizer, params, optimizer.init(params), "b/kernel")
      >>> {place: array.shape for place, array in entries.items()}
      {'inner_states/matrices/inner_state/0/inner/skipped/2x3': (1,),
       'inner_states/matrices/inner_state/0/inner/inner/0/0/mu/2x3': (1, 2, 3)}
    """
    names = named_leaves(params).present()
    if path not in names:
        raise ValueError(f"path: there is no parameter {path!r}; the paths are {', '.join(names)}.")
    entries = entries_of(optimizer, params)
    leaves = jax.tree.leaves(portable_state(optimizer, params, state))
    return {
        place: own if part is None else own[part]
        for entry, leaf in zip(entries, leaves, strict=True)
        for owner, part in entry.owners
        if owner == path
        for place, own in entry.parts(leaf).items()
    }


def summarize(optimizer: Any, params: Any) -> str:
    """A table of how the optimizer treats each parameter and how many bytes its state takes.

    Args:
      optimizer: any Optax transformation.
      params: parameters or their shapes.

    Returns:
      A Markdown table with one line per parameter (its matrices and the stack that holds them, or
      why it is not a matrix; its share of the state), and one with a line per part of the state.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> print(curvax.summarize(curvax.muon(0.1), params))
      | parameter | shape | treated as | state bytes |
      |---|---|---|---|
      | dense/bias | 8 float32 | not a matrix: vector | 68 |
      | dense/kernel | 4×8 float32 | 1 matrix 4×8 in stack 4x8 | 132 |
      | shared | | | 8 |
      | **total** | | | **208** |
      <BLANKLINE>
      | part of the state | bytes |
      |---|---|
      | mu | 160 |
      | nu | 32 |
      | skipped | 8 |
      | count | 8 |
    """
    entries, events = _entries_and_events(optimizer, params)
    treatment = _treatments(events)
    own, parts, shared = dict.fromkeys(named_leaves(params).present(), 0), {}, 0
    for entry in entries:
        parts[entry.field] = parts.get(entry.field, 0) + _bytes(entry.leaf)
        if not entry.owners:
            shared += _bytes(entry.leaf)
        for owner, part in entry.owners:
            whole = _bytes(entry.leaf)
            share = 1 if part is None else (part.stop - part.start) / entry.leaf.shape[0]
            own[owner] += round(whole * share)
    rows = [
        f"| {name} | {_shape(leaf)} | {treatment.get(name, 'as stored')} | {own[name]:,} |"
        for name, leaf in named_leaves(params).present().items()
    ]
    total = sum(own.values()) + shared
    by_part = sorted(parts.items(), key=lambda item: -item[1])
    return "\n".join(
        [
            "| parameter | shape | treated as | state bytes |",
            "|---|---|---|---|",
            *rows,
            f"| shared | | | {shared:,} |",
            f"| **total** | | | **{total:,}** |",
            "",
            "| part of the state | bytes |",
            "|---|---|",
            *(f"| {field} | {size:,} |" for field, size in by_part),
        ]
    )


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
        return tuple(f"{self.place}/{name}" for name in self.names) or (self.place,)

    def parts(self, array: Any) -> dict[str, Any]:
        """The values of `array` at each of `places`."""
        counters = [array[..., i] for i in range(len(self.names))]
        return dict(zip(self.places, counters or [array], strict=True))


def entries_of(optimizer: Any, params: Any) -> list[Entry]:
    """Every array of the optimizer's portable state, with its owners."""
    return _entries_and_events(optimizer, params)[0]


def _entries_and_events(optimizer: Any, params: Any) -> tuple[list[Entry], list[Any]]:
    """Every array of the state, in the state's order, and the recorded events."""
    found: list[list[Entry]] = []
    events: list[Any] = []

    def traced(params: Any) -> Any:
        with recording() as recorded:
            state = optimizer.init(params)
        views = {id(e.state): e for e in recorded if isinstance(e, ViewRecord)}
        copies = [e for e in recorded if isinstance(e, CopyRecord)]
        views |= {id(e.copy): views[id(e.state)] for e in copies}
        guards = {id(e.skipped): e.names for e in recorded if isinstance(e, GuardRecord)}
        layouts = {id(e.state): e.layout for e in recorded if isinstance(e, DivisionRecord)}
        found.append(list(_walk(state, views, guards, layouts, params)))
        events.extend(recorded)
        return state

    jax.eval_shape(traced, params)
    return found[0], events


def _walk(state: Any, views: Any, guards: Any, layouts: Any, params: Any) -> Iterator[Entry]:
    named = named_leaves(params)
    shapes = [None if is_hole(x) else jnp.shape(x) for x in named.leaves]

    def is_whole(node: Any) -> bool:
        """Whether `node` is one parameter's entry in a tree like the parameters."""
        return is_hole(node) or isinstance(node, Coded)

    def is_moment(node: Any) -> bool:
        """Whether `node` is a tree like the parameters, perhaps with holes."""
        leaves, treedef = jax.tree.flatten(node, is_leaf=is_whole)
        return treedef == named.treedef and all(
            is_whole(x) or jnp.shape(x) == shape for x, shape in zip(leaves, shapes, strict=True)
        )

    def is_unit(node: Any) -> bool:
        return isinstance(node, MatrixViewState) or is_moment(node)

    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_unit):
        view = views.get(id(node)) if isinstance(node, MatrixViewState) else None
        if is_moment(node) and not isinstance(node, MatrixViewState):
            leaves = jax.tree.leaves(node, is_leaf=is_whole)
            for name, entry in zip(named.names, leaves, strict=True):
                for inner_path, leaf in jax.tree_util.tree_leaves_with_path(entry):
                    full = "/".join(filter(None, (_place(path), name, _place(inner_path))))
                    field = "/".join((_field(path), *_names(inner_path)))
                    if not is_hole(leaf):
                        yield Entry(full, field, _abstract(leaf), ((name, None),))
            continue
        if isinstance(node, MatrixViewState) and id(node.inner) in layouts:
            node = MatrixViewState(layouts[id(node.inner)].joined_shapes)
        for inner_path, found in jax.tree_util.tree_leaves_with_path(node, is_leaf=_is_counts):
            names, leaf = (found.names, found.value) if _is_counts(found) else ((), found)
            keys = (*path, *inner_path[: -1 if names else None])
            owners = () if view is None else _owners(view, inner_path)
            if id(leaf) in guards:
                members = guards[id(leaf)]
                owners = tuple((name, slice(i, i + 1)) for i, name in enumerate(members))
            field = _field(path, inner_path)
            yield Entry(_place(keys), field, _abstract(leaf), owners, names)


def _is_counts(node: Any) -> bool:
    return isinstance(node, Counts)


def _place(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _owners(view: ViewRecord, path: tuple[Any, ...]) -> tuple[tuple[str, slice | None], ...]:
    keys = {getattr(key, "key", None) for key in path}
    for group in view.groups:
        if group.key in keys:
            return tuple((form.name, place) for form, place in group.slices())
    return ()


def _field(path: tuple[Any, ...], within: tuple[Any, ...] = ()) -> str:
    """The innermost field of a state's tuples on the path to a leaf; in an entry, all below it."""
    last = max(
        (i for i, k in enumerate(within) if isinstance(k, jax.tree_util.DictKey)), default=-1
    )
    outside, inside = _names((*path, *within[: last + 1])), _names(within[last + 1 :])
    if last < 0 or (inside and inside[0] not in Coded._fields):
        return "/".join(inside if last >= 0 else (outside + inside)[-1:]) or "state"
    return "/".join((*outside[-1:], *inside))


def _names(path: tuple[Any, ...]) -> list[str]:
    """The fields of tuples on a path."""
    return [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey) and k.name != "value"]


def _treatments(events: list[Any]) -> dict[str, str]:
    treatment: dict[str, str] = {}
    kept = {event.order: event.form for event in events if isinstance(event, StorageRecord)}
    devices = {k: n for e in events if isinstance(e, DivisionRecord) for k, n in e.devices()}
    ranks = {event.shape: event.text for event in events if isinstance(event, RankRecord)}
    for event in events:
        if isinstance(event, RoutingRecord):
            reasons = {n: t for n, t in event.treatments.items() if isinstance(t, str)}
            treatment |= {n: f"not a matrix: {reason}" for n, reason in reasons.items()}
        elif isinstance(event, ViewRecord):
            for group in event.groups:
                for form in group.members:
                    rank = ranks.get(form.tile)
                    text = _describe(form, group.key, kept)
                    spread = devices.get(group.key)
                    treatment[form.name] = "; ".join(filter(None, (text, rank, spread)))
    return treatment


def _describe(form: MatrixForm, key: str, kept: dict[int, str]) -> str:
    matrices = "1 matrix" if form.count == 1 else f"{form.count} matrices"
    tiles = form.row_tiles * form.column_tiles
    tiled = f" ({form.row_tiles}×{form.column_tiles} tiles)" if tiles > 1 else ""
    where = "an entry of its own" if key == form.name else f"stack {key}"
    forms = {order: kept[order] for order in sorted(set(form.tile)) if order in kept}
    stored = "; ".join(f"order {order}: {text}" for order, text in forms.items())
    stored = f"; {stored}" if set(forms.values()) - {"dense"} else ""
    return f"{matrices} {form.tile[0]}×{form.tile[1]}{tiled} in {where}{stored}"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _shape(leaf: Any) -> str:
    return f"{'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}"
