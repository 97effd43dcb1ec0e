"""The direction of `foam`: the chain of parts that it is."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_decay
from ..transforms.refresh._foam import foam as foam_policy
from ..transforms.storage._storage import Storage
from ._shampoo_direction import scale_by_shampoo


def scale_by_foam(
    *,
    check_every: int = 20,
    threshold: float = 0.75,
    max_damping: float = 3e-7,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.995,
    eps: jax.typing.ArrayLike = 1e-9,
    root: int = 2,
    graft: str | None = "adam",
    stagger: bool = False,
    storage: Storage | None = None,
) -> optax.GradientTransformation:
    """The direction of `foam` on batches of matrices `(..., m, n)`; see there."""
    check_decay("b1", b1)
    check_decay("b2", b2)
    return scale_by_shampoo(
        b2=b2,
        eps=eps,
        root=root,
        refresh=foam_policy(check_every, threshold, max_damping, stagger=stagger),
        statistics_every=1,
        graft=graft,
        adam_graft_b1=b1,
        damping_mode="absolute",
        initial=0.0,
        storage=storage,
    )
