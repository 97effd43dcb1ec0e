"""The format of states: a version number and a list of arrays, to be kept beside a checkpoint.

`STATE_FORMAT` grows whenever the same call gives a state with other arrays, or with arrays of
another meaning (`docs/checkpoints.md`); a test enforces it.
"""

from __future__ import annotations

from typing import Any

import jax

from ._portable import portable_state

STATE_FORMAT = 3


def describe_state(optimizer: Any, params: Any) -> dict[str, Any]:
    """Describes the checkpoint of an optimizer's state, in plain values for a JSON file.

    Args:
      optimizer: any Optax transformation.
      params: its parameters, or their shapes.

    Returns:
      The version of curvax's state format, and the dtype and shape of every array of the portable
      state by its path. It does not depend on meshes.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> curvax.describe_state(curvax.scale_by_muon(), params)["arrays"]
      {'0/count': 'int32[]', '0/mu/dense/kernel': 'float32[4, 8]'}
    """
    shapes = jax.eval_shape(optimizer.init, params)
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{[*x.shape]}"
        for path, x in jax.tree_util.tree_leaves_with_path(
            portable_state(optimizer, params, shapes)
        )
    }
    return {"curvax_state_format": STATE_FORMAT, "arrays": arrays}


def check_state(optimizer: Any, params: Any, description: Any) -> None:
    """Requires a checkpoint to hold the state of this optimizer for these parameters.

    Call it before restoring, with the description that was written beside the checkpoint.

    Args:
      optimizer: the transformation that will use the state.
      params: its parameters, or their shapes.
      description: the result of `describe_state`, as read from its file.

    Raises:
      ValueError: if it is not a description, or names another format or other arrays.
    """
    own = describe_state(optimizer, params)
    found = description.get("curvax_state_format") if isinstance(description, dict) else None
    arrays = description.get("arrays") if isinstance(description, dict) else None
    if not isinstance(found, int) or not isinstance(arrays, dict):
        raise ValueError(
            "description: expected the result of curvax.describe_state, "
            f"got {str(description)[:80]!r}."
        )
    if found != STATE_FORMAT:
        age = "an older" if found < STATE_FORMAT else "a later"
        raise ValueError(
            f"description: the checkpoint has state format {found}, from {age} version of curvax; "
            f"this version reads format {STATE_FORMAT}. CHANGELOG.md lists what has changed."
        )
    places = sorted({*own["arrays"], *arrays})
    differing = [place for place in places if own["arrays"].get(place) != arrays.get(place)]
    if differing:
        first = "; ".join(
            f"{place}: {arrays.get(place, 'nothing')} in the checkpoint, "
            f"{own['arrays'].get(place, 'nothing')} here"
            for place in differing[:3]
        )
        raise ValueError(
            f"description: {len(differing)} of {len(places)} arrays of the state differ ({first}): "
            "it belongs to another optimizer, or to other parameters, blocks or ranks."
        )
