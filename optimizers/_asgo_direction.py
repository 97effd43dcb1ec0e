"""The direction of `asgo`: the chain of parts that it is."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_choice
from ..transforms.directions._momentum import momentum
from ..transforms.kronecker._precondition import precondition
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.storage._storage import Storage


def scale_by_asgo(
    *,
    b1: jax.typing.ArrayLike | None = None,
    b2: jax.typing.ArrayLike | None = None,
    eps: jax.typing.ArrayLike = 1e-6,
    refresh: Refresh = 1,
    variant: str = "practical",
    storage: Storage | None = None,
    side: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `asgo` on batches of matrices `(..., m, n)`; see there for the arguments."""
    check_choice("variant", variant, ("practical", "theoretical", "from_momentum"))
    check_choice("side", side, (None, "left", "right", "smaller"))
    theoretical = variant == "theoretical"
    if theoretical and not (b1 is None and b2 is None):
        raise ValueError(f"variant='theoretical' has no b1 and b2, got b1={b1!r}, b2={b2!r}.")
    return precondition(
        None if theoretical else momentum(0.9 if b1 is None else b1, dtype=dtype),
        refresh=as_policy(refresh, offset=1, first=True),
        side=("left" if theoretical else "smaller") if side is None else side,
        square="right",
        root=2,
        b2=None if theoretical else (0.95 if b2 is None else b2),
        eps=eps,
        damping_mode="outside" if theoretical else "absolute",
        statistics="momentum" if variant == "from_momentum" else "gradient",
        storage=storage,
    )
