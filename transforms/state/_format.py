"""The format of states: a number and a list of arrays, to be kept beside a checkpoint.

`STATE_FORMAT` grows whenever the same call gives a state with other arrays, or the same arrays with
another meaning; `docs/checkpoints.md` has the rule, and a test holds it.
"""

from __future__ import annotations

from typing import Any

import jax

from ._portable import portable_state

STATE_FORMAT = 3


def describe_state(optimizer: Any, params: Any) -> dict[str, Any]:
    """What a checkpoint of an optimizer's state holds, as plain values for a JSON file.

    Args:
      optimizer: any Optax transformation.
      params: its parameters, or their shapes.

    Returns:
      The number of the format of curvax's states, and shape and dtype of every array of the
      portable state by its place. It does not depend on meshes.

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
    """Requires a checkpoint to hold a state of this optimizer, for these parameters.

    Call it before restoring, with what `describe_state` gave when the checkpoint was written.

    Args:
      optimizer: the transformation that is to go on.
      params: its parameters, or their shapes.
      description: of the checkpoint's state, as read from its file.

    Raises:
      ValueError: if the description is none, of another format, or of other arrays; it says which.
    """
    own = describe_state(optimizer, params)
    found = description.get("curvax_state_format") if isinstance(description, dict) else None
    arrays = description.get("arrays") if isinstance(description, dict) else None
    if not isinstance(found, int) or not isinstance(arrays, dict):
        raise ValueError(
            "description: this is not what curvax.describe_state gives, so nothing is known of the "
            f"checkpoint; got {str(description)[:80]!r}."
        )
    if found != STATE_FORMAT:
        age = "an older" if found < STATE_FORMAT else "a later"
        raise ValueError(
            f"description: the checkpoint has states of format {found}, from {age} version of "
            f"curvax; this one reads format {STATE_FORMAT}. CHANGELOG.md says what has changed."
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
            "it is that of another optimizer, or of other parameters, blocks or ranks."
        )
