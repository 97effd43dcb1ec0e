"""The tree without leaves by which Optax asks where a state holds copies of the parameters."""

from __future__ import annotations

from typing import Any

import jax


def is_placeholder(params: Any) -> bool:
    """Whether `params` is the leafless placeholder of `optax.tree.map_params`."""
    return not jax.tree.leaves(params) and type(params).__name__ == "_ParamsPlaceholder"
