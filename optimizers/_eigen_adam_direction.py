"""The direction of `eigen_adam`: the chain of parts that it is."""

from __future__ import annotations

import jax
import optax

from ..transforms.refresh._policy import Refresh
from ..transforms.storage._storage import Storage
from ._soap import scale_by_soap


def scale_by_eigen_adam(
    *,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.95,
    b3: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    method: str = "eigh",
    skip_first: bool = False,
    refresh: Refresh = 10,
    storage: Storage | None = None,
    side: str = "left",
) -> optax.GradientTransformation:
    """The direction of `eigen_adam` on batches of matrices `(..., m, n)`; see there."""
    return scale_by_soap(
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        bias_correction=bias_correction,
        method=method,
        skip_first=skip_first,
        refresh=refresh,
        storage=storage,
        side=side,
    )
