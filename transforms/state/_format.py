"""The format of states: a version number and a list of arrays, to be kept beside a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from .._own_state import causes
from .._paths import is_hole, named_leaves
from .._recording import Meaning
from .._validate import check_bool
from ..matrices._form import MatrixForm
from ._description import STATE_FORMAT, checked
from ._portable import by_parameter
from ._traced import traced


def describe_state(optimizer: Any, params: Any) -> dict[str, Any]:
    """Describes the checkpoint of an optimizer's state, in plain values for a JSON file.

    Args:
      optimizer: any Optax transformation.
      params: its parameters, or their shapes.

    Returns:
      A dictionary with

      - `curvax_state_format`: the version of curvax's state format;
      - `arrays`: dtype and shape of every array of the portable state, by its path;
      - `matrices`: for each parameter that is a matrix, its axes and how it is cut into matrices;
      - `empty`: the paths of containers without arrays, such as that of a weight decay;
      - `parts`: the meaning of arrays whose shapes do not tell it: refresh policies and codes;
      - `stacks`: the parameters whose matrices share an array in the state itself, in order.

      Only `stacks` depends on meshes and on `stack=`.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> curvax.describe_state(curvax.scale_by_muon(), params)["arrays"]
      {'0/count': 'int32[]', '0/mu/dense/kernel': 'float32[4, 8]'}
    """
    whole = traced(optimizer, params)
    portable = by_parameter(whole.joined)
    leaves = named_leaves(portable).present()
    with_path = jax.tree_util.tree_leaves_with_path(portable, is_leaf=_is_empty)
    empty = [path for path, node in with_path if _is_empty(node)]
    parts = dict.fromkeys(e.text for e in whole.events if isinstance(e, Meaning))
    return {
        "curvax_state_format": STATE_FORMAT,
        "arrays": {name: f"{x.dtype}{[*x.shape]}" for name, x in leaves.items()},
        "matrices": {name: _described(form) for name, form in sorted(whole.forms.items())},
        "empty": [jax.tree_util.keystr(path, simple=True, separator="/") for path in empty],
        "parts": list(parts),
        "stacks": [[[s.key, [[*m] for m in s.members]] for s in view] for view in whole.stacks],
    }


def _is_empty(node: Any) -> bool:
    return isinstance(node, tuple) and not node and not is_hole(node)


def _described(form: MatrixForm) -> str:
    """How a parameter is seen as matrices."""
    tiles = f" in {form.row_tiles}x{form.column_tiles} tiles"
    part = f" from column {form.start} of {form.all_columns}" if form.is_part else ""
    return (
        f"axes {list(form.permutation)} as {form.batch} of {form.rows}x{form.columns}{part}"
        f"{tiles if form.row_tiles * form.column_tiles > 1 else ''}"
    )


def _only_in(places: Iterable[str], others: Iterable[str], where: str) -> str:
    """Names the fields, and the parameters, that are on paths in one state alone."""
    fields, known = (dict.fromkeys("/".join(p).split("/")) for p in (places, others))
    alone = [field for field in fields if field not in (*known, "") and not field.isdigit()]
    return f"only {where} has {', '.join(alone)}. " if alone else ""


def check_state(optimizer: Any, params: Any, description: Any, *, portable: bool = False) -> None:
    """Requires a checkpoint to hold the state of this optimizer for these parameters.

    Call it before restoring, with the description that was written beside the checkpoint.

    Args:
      optimizer: the transformation that will use the state.
      params: its parameters, or their shapes.
      description: the result of `describe_state`, as read from its file.
      portable: whether the checkpoint holds the result of `portable_state`, to which the order of
        stacks does not matter, and not the state itself.

    Raises:
      ValueError: if it is not a description, or names another format, other arrays, arrays of
        another meaning, or stacks that hold the parameters in another order.
    """
    check_bool("portable", portable)
    own = describe_state(optimizer, params)
    given = checked(description)
    for what, entries in (("arrays of the state", "arrays"), ("matrices", "matrices")):
        mine, other = own[entries], given[entries]
        places = sorted({*mine, *other})
        differing = [place for place in places if mine.get(place) != other.get(place)]
        if differing:
            first = "; ".join(
                f"{place}: {other.get(place, 'nothing')} in the checkpoint, "
                f"{mine.get(place, 'nothing')} here"
                for place in differing[:3]
            )
            raise ValueError(
                f"description: {_only_in(other, mine, 'the checkpoint')}"
                f"{_only_in(mine, other, 'this optimizer')}{len(differing)} of {len(places)} "
                f"{what} differ ({first}). {causes(mine, other)}"
            )
    if own["parts"] != given["parts"]:
        raise ValueError(
            "description: the arrays have the same shapes but another meaning: "
            f"{'; '.join(given['parts'])} in the checkpoint, {'; '.join(own['parts'])} here."
        )
    if own["empty"] != given["empty"]:
        places = sorted({*own["empty"]} ^ {*given["empty"]})
        raise ValueError(
            f"description: the arrays are the same, but not the containers around them ({places[0]}"
            ", for one), as after another base or mask. Restore the checkpoint without a target, "
            "and curvax.place_state puts each array in its place."
        )
    if not portable and own["stacks"] != given["stacks"]:
        raise ValueError(
            "description: the stacks of the state hold other parameters, or the same in another "
            "order. Save curvax.portable_state and give check_state portable=True, or give "
            "curvax.place_state the description, which puts each entry where it belongs."
        )
