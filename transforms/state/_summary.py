"""How an optimizer treats each parameter, and how large its state is."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._paths import named_leaves
from .._recording import RankRecord
from .._validate import shown
from ..distribute._distribute import Division
from ..matrices._form import MatrixForm
from ..matrices._routing import RoutingRecord
from ..matrices._view import ViewRecord
from ..storage._storage import StorageRecord
from ._entries import owned_entries
from ._portable import joined_state
from ._traced import Traced, check_optimizer, traced

LARGE, HEAVY = 2**30, 10
"""`summarize` warns of states of parameters above so many bytes and so many times the parameter."""


def state_bytes(optimizer: Any, params: Any) -> int:
    """The size in bytes of the optimizer's state for `params`, by `jax.eval_shape`.

    Args:
      optimizer: any Optax transformation.
      params: the parameters, or their shapes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, curvax
      >>> params = {"kernel": jax.ShapeDtypeStruct((8192, 28672), jnp.bfloat16)}
      >>> curvax.state_bytes(curvax.racs(0.1), params)
      147480
    """
    check_optimizer(optimizer, params)
    return sum(map(_bytes, jax.tree.leaves(jax.eval_shape(optimizer.init, params))))


def state_of(optimizer: Any, params: Any, state: Any, path: str) -> dict[str, Any]:
    """The entries of an optimizer's state that belong to one parameter.

    Args:
      optimizer, params, state: see `portable_state`.
      path: path of the parameter, such as "block_0/mlp/kernel".

    Returns:
      Arrays by their path in the state. The first axis runs over the parameter's matrices (batch,
      heads, blocks). Step counters and other entries that all parameters share are left out.

    Raises:
      ValueError: if no parameter has this path; the message lists the paths.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"a": {"kernel": jnp.ones((2, 3))}, "b": {"kernel": jnp.ones((2, 3))}}
      >>> optimizer = curvax.muon(0.1)
      >>> entries = curvax.state_of(optimizer, params, optimizer.init(params), "b/kernel")
      >>> {place: array.shape for place, array in entries.items()}
      {'inner_states/matrices/inner_state/0/inner/2x3/skipped': (1,),
       'inner_states/matrices/inner_state/0/inner/2x3/restarted': (1,),
       'inner_states/matrices/inner_state/0/inner/2x3/damaged': (1,),
       'inner_states/matrices/inner_state/0/inner/2x3/inner/0/0/mu': (1, 2, 3)}
    """
    check_optimizer(optimizer, params)
    names = named_leaves(params).present()
    if path not in names:
        raise ValueError(f"path: there is no parameter {path!r}; the paths are {', '.join(names)}.")
    return {place: x for _, place, x in owned_arrays(optimizer, params, state, (path,))}


def owned_arrays(
    optimizer: Any, params: Any, state: Any, owners: Collection[str] | None = None
) -> Iterator[tuple[str, str, jax.Array]]:
    """The arrays of a state that parameters (all, or `owners`) own: owner, place, its part."""
    whole = traced(optimizer, params)
    leaves = jax.tree.leaves(joined_state(whole, state))
    for entry, leaf in zip(owned_entries(whole, params), leaves, strict=True):
        for owner, part in entry.owners:
            if owners is None or owner in owners:
                for place, array in entry.values_by_place(leaf).items():
                    yield owner, place, array if part is None else array[part]


def summarize(optimizer: Any, params: Any) -> str:
    """A table of how the optimizer treats each parameter and how many bytes its state takes.

    Args:
      optimizer: any Optax transformation.
      params: the parameters, or their shapes.

    Returns:
      A Markdown table with one line per parameter (its matrices and the stack that holds them, or
      why it is not a matrix; its share of the state), and one with a line per part of the state. "A
      guess" marks a matrix whose name says nothing: check it (`docs/matrices.md`). A sentence at
      the end names each parameter with a state above 1 GiB and ten times its own size.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> print(curvax.summarize(curvax.muon(0.1), params))
      | parameter | shape | treated as | state bytes |
      |---|---|---|---|
      | dense/bias | 8 float32 | not a matrix: vector | 68 |
      | dense/kernel | 4×8 float32 | 1 matrix 4×8 in stack 4x8 | 140 |
      | shared | | | 8 |
      | **total** | | | **216** |
      <BLANKLINE>
      | part of the state | bytes |
      |---|---|
      | mu | 160 |
      | nu | 32 |
      | counts | 12 |
      | count | 8 |
      | skipped | 4 |
    """
    leaves = named_leaves(params).present()
    if not leaves:
        raise ValueError(f"params must have arrays, or their shapes; got {shown(params)}.")
    whole = traced(optimizer, params)
    entries, treatment = owned_entries(whole, params), _treatments(whole.events)
    sizes, parts, shared = Counter[str](), Counter[str](), 0
    for entry in entries:
        size = _bytes(entry.leaf)
        parts[entry.field] += size
        shared += 0 if entry.owners else size
        for owner, part in entry.owners:
            share = 1 if part is None else (part.stop - part.start) / entry.leaf.shape[0]
            sizes[owner] += round(size * share)
    rows = [
        f"| {name} | {'×'.join(map(str, jnp.shape(x))) or 'scalar'} {jnp.result_type(x)} "
        f"| {treatment.get(name, 'as stored')} | {sizes[name]:,} |"
        for name, x in leaves.items()
    ]
    total = sum(sizes.values()) + shared
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
            *(f"| {field} | {size:,} |" for field, size in parts.most_common()),
            *(f"\n{note}" for note in (*_notes(whole, params), *_warnings(params, sizes))),
        ]
    )


def _notes(whole: Traced, params: Any) -> Iterator[str]:
    leaves = named_leaves(params).present()
    names = dict.fromkeys(form.parameter for form in whole.forms.values())
    placed = [x for x in map(leaves.get, names) if getattr(x, "sharding", None) is not None]
    parts = [(x, x.sharding.shard_shape(x.shape)) for x in placed]  # pyright: ignore
    missing = sum(_bytes(x) - _bytes(x, part) for x, part in parts)
    detour = (
        "\nOn Auto axes of TPUs XLA does not say how the kernels lie, and gradients and updates "
        "take a detour. With mesh=jax.tree.map(lambda x: x.sharding, params) they take none."
    )
    for division in whole.divisions:
        shares, detours = division.layout.shares, bool(missing and division.on_detour)
        busiest, held = f"{shares.busiest:.2f} of the mean work", f"{division.layout.held:.2f}"
        yield (
            f"Of {shares.devices} devices the busiest has {busiest}, and each stores {held} of an "
            "equal share of the matrices' state." + detour * detours
        )
    devices = max((len(x.sharding.device_set) for x in placed), default=1)  # pyright: ignore
    if devices > 1 and not whole.divisions:
        yield (
            f"Without mesh= each of {devices} devices may do the work of all matrices, and receive "
            f"{missing:,} bytes of gradients for it in a step. On Auto axes XLA may divide single "
            "products instead, and exchange more."
        )


def _warnings(params: Any, sizes: Counter[str]) -> Iterator[str]:
    """Sentences about the parameters whose state is unexpectedly large, such as heads."""
    for name, leaf in named_leaves(params).present().items():
        times = sizes[name] / max(1, _bytes(leaf))
        if sizes[name] > LARGE and times > HEAVY:
            yield (
                f"The state of {name!r} is {times:.0f} times as large as the parameter. `side=` "
                "and `max_order=` leave out a long side, `MatrixRule(block_size=1200)` cuts it, "
                "and `MatrixRule(output_layer=...)` gives a head to AdamW."
            )


def _treatments(events: Sequence[Any]) -> dict[str, str]:
    kept = {event.order: event.form for event in events if isinstance(event, StorageRecord)}
    devices = {k: n for e in events if isinstance(e, Division) for k, n in e.devices()}
    ranks = {event.shape: event.text for event in events if isinstance(event, RankRecord)}
    routed = [pair for e in events if isinstance(e, RoutingRecord) for pair in e.treatments.items()]
    texts: dict[str, dict[int, str]] = {}  # of parameters, by the first column of a part
    for group in (group for e in events if isinstance(e, ViewRecord) for group in e.groups):
        for form in group.members:
            text = _describe(form, group.key, kept)
            parts = (text, form.said_by, ranks.get(form.tile), devices.get(group.key))
            texts.setdefault(form.parameter, {})[form.start] = "; ".join(filter(None, parts))
    return {n: f"not a matrix: {reason}" for n, reason in routed if isinstance(reason, str)} | {
        name: " + ".join(by_start[start] for start in sorted(by_start))
        for name, by_start in texts.items()
    }


def _describe(form: MatrixForm, key: str, kept: dict[int, str]) -> str:
    matrices = "1 matrix" if form.count == 1 else f"{form.count} matrices"
    tiled = f" ({form.row_tiles}×{form.column_tiles} tiles)" if form.is_tiled else ""
    where = "an entry of its own" if key == form.name else f"stack {key}"
    forms = {order: kept[order] for order in sorted(set(form.tile)) if order in kept}
    stored = "; ".join(f"order {order}: {text}" for order, text in forms.items())
    stored = f"; {stored}" if set(forms.values()) - {"dense"} else ""
    return f"{matrices} {form.tile[0]}×{form.tile[1]}{tiled} in {where}{stored}"


def _bytes(leaf: Any, part: tuple[int, ...] | None = None) -> int:
    """The size of an array, or of a part of it with this shape."""
    return math.prod(jnp.shape(leaf) if part is None else part) * jnp.result_type(leaf).itemsize
