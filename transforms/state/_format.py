"""The format of states: a version number and a list of arrays, to be kept beside a checkpoint.

`STATE_FORMAT` grows whenever the same call gives a state with other arrays, or with arrays of
another meaning (`docs/checkpoints.md`); a test enforces it.
"""

from typing import Any

import jax

from .._own_state import difference, kinds_of
from .._paths import is_hole, named_leaves
from .._recording import Meaning
from .._validate import Flag, shown
from ..matrices._form import MatrixForm
from ._traced import Stack, by_parameter, place_of, traced

STATE_FORMAT = 2


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
      - `parts`: the meaning of arrays whose shapes do not tell it: refresh policies, codes and
        their tiles, momenta that are sums, sides of neurons;
      - `stacks`: the parameters whose matrices share an array in the state itself, in order.

      Only `stacks` depends on meshes and on `stack=`.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> curvax.describe_state(curvax.scale_by_muon(), params)["arrays"]
      {'0/count': 'int32[]', '0/mu/dense/kernel': 'float32[4, 8]'}
    """
    is_empty = lambda node: isinstance(node, tuple) and not node and not is_hole(node)  # noqa: E731
    whole = traced(optimizer, params)
    portable = by_parameter(whole.undivided)
    leaves = named_leaves(portable).present()
    with_path = jax.tree_util.tree_leaves_with_path(portable, is_leaf=is_empty)
    parts = dict.fromkeys(e.text for e in whole.events if isinstance(e, Meaning))
    return {
        "curvax_state_format": STATE_FORMAT,
        "arrays": kinds_of(leaves),
        "matrices": {name: _described(form) for name, form in sorted(whole.forms.items())},
        "empty": [place_of(path) for path, node in with_path if is_empty(node)],
        "parts": list(parts),
        "stacks": [[[s.key, [[*m] for m in s.members]] for s in view] for view in whole.stacks],
    }


def _described(form: MatrixForm) -> str:
    tiles = f" in {form.row_tiles}x{form.column_tiles} tiles" if form.is_tiled else ""
    part = f" from column {form.start} of {form.all_columns}" if form.is_part else ""
    matrices = f"{form.batch} of {form.rows}x{form.columns}"
    return f"axes {list(form.permutation)} as {matrices}{part}{tiles}"


def check_state(optimizer: Any, params: Any, description: Any, *, portable: bool = False) -> None:
    """Requires a checkpoint to hold the state of this optimizer for these parameters.

    Call it before restoring, with the description that was written beside the checkpoint.

    Args:
      optimizer, params: see `place_state`.
      description: the result of `describe_state`, as read from its file.
      portable: whether the checkpoint holds the result of `portable_state`, to which the order of
        stacks does not matter, and not the state itself.

    Raises:
      ValueError: if it is not a description, or names another format, other arrays, arrays of
        another meaning, or stacks that hold the parameters in another order.
    """
    Flag().check("portable", portable)
    if isinstance(params, dict) and "curvax_state_format" in params:
        raise ValueError(
            "params, the second argument, must be parameters or their shapes; got a description "
            "of a state. The order is (optimizer, params, description)."
        )
    expected, stored = describe_state(optimizer, params), checked(description)
    for what in ("arrays", "matrices"):
        message = difference("description", expected[what], stored[what], what=what)
        if message is not None:
            raise ValueError(message)
    if expected["parts"] != stored["parts"]:
        raise ValueError(
            "description: the arrays have the same shapes but another meaning: "
            f"{'; '.join(stored['parts'])} in the checkpoint, {'; '.join(expected['parts'])} here."
        )
    if expected["empty"] != stored["empty"]:
        places = sorted({*expected["empty"]} ^ {*stored["empty"]})
        raise ValueError(
            f"description: the arrays are the same, but not the containers around them ({places[0]}"
            ", for one), as after another base or mask. Restore the checkpoint without a target, "
            "and curvax.place_state puts each array in its place."
        )
    if not portable and expected["stacks"] != stored["stacks"]:
        raise ValueError(
            "description: the stacks of the state hold other parameters, or the same in another "
            "order. Save curvax.portable_state and give check_state portable=True, or give "
            "curvax.place_state the description, which puts each entry where it belongs."
        )


KINDS = {
    "curvax_state_format": int,
    "arrays": {str: str},
    "matrices": {str: str},
    "empty": [str],
    "parts": [str],
    "stacks": [[(str, [(str, int)])]],
}
"""The types of the entries of a description."""


def _is_of(kind: Any, x: Any) -> bool:
    if isinstance(kind, dict):
        return isinstance(x, dict) and all(isinstance(y, str) for y in (*x, *x.values()))
    if isinstance(kind, list):
        return isinstance(x, list) and all(_is_of(kind[0], y) for y in x)
    if isinstance(kind, tuple):
        pair = isinstance(x, (list, tuple)) and len(x) == 2
        return pair and all(map(_is_of, kind, x))
    return type(x) is int and x > 0 if kind is int else isinstance(x, str)


def checked(description: Any) -> dict[str, Any]:
    """The description, which a file may have changed, if it is one of a state of this format."""
    entries = description if isinstance(description, dict) else {}
    version = entries.get("curvax_state_format")
    if type(version) is int and version != STATE_FORMAT:
        age = "an older" if version < STATE_FORMAT else "a later"
        raise ValueError(
            f"description: the checkpoint has state format {version}, from {age} version of "
            f"curvax; this version reads format {STATE_FORMAT}. Install that version, or start "
            "with optimizer.init(params)."
        )
    wrong = next((key for key, kind in KINDS.items() if not _is_of(kind, entries.get(key))), None)
    if wrong is not None:
        entry = f", whose entry {wrong!r} is {shown(entries[wrong])}" if wrong in entries else ""
        raise ValueError(
            "description: expected the result of curvax.describe_state, got "
            f"{str(description)[:80]!r}{entry}."
        )
    return entries


def stacks_in(description: Any) -> list[list[Stack]]:
    """The stacks of each matrix view of a description, which it checks."""
    return [
        [Stack(key, tuple((name, count) for name, count in members)) for key, members in view]
        for view in checked(description)["stacks"]
    ]
