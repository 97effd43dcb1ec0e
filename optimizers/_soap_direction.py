"""The direction of `soap`: the chain of parts that it is."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_choice
from ..transforms.directions._moment_ratio import moment_ratio
from ..transforms.kronecker._eigenbasis import in_eigenbasis
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.storage._storage import Storage


def scale_by_soap(
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
    side: str = "both",
) -> optax.GradientTransformation:
    """The direction of `soap` on batches of matrices `(..., m, n)`; see there for the arguments."""
    check_choice("side", side, ("both", "left", "right", "smaller"))
    return in_eigenbasis(
        moment_ratio(b1, b2, eps, bias_correction=bias_correction),
        refresh=as_policy(refresh, offset=0, first=True),
        side=side,
        b3=b3,
        method=method,
        storage=storage,
        skip_first=skip_first,
    )
