r"""The direction of Shampoo, which `shampoo`, `foam` and `dr_shampoo` share."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_choice, check_decay
from ..transforms.directions._graft import graft as graft_lengths
from ..transforms.directions._momentum import momentum
from ..transforms.kronecker._precondition import precondition
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.storage._storage import Storage


def scale_by_shampoo(
    *,
    b2: jax.typing.ArrayLike | None = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    root: int = 4,
    refresh: Refresh = 500,
    statistics_every: int | None = None,
    graft: str | None = "norm",
    b1: jax.typing.ArrayLike | None = None,
    adam_graft_b1: jax.typing.ArrayLike = 0.95,
    damping_mode: str = "relative",
    initial: jax.typing.ArrayLike | None = None,
    solver: str = "eigh",
    side: str = "both",
    warmup_steps: int = 0,
    storage: Storage | None = None,
) -> optax.GradientTransformation:
    """The direction of `shampoo` on batches of matrices `(..., m, n)`; see there."""
    check_choice("graft", graft, ("norm", "adam", None))
    check_choice("side", side, ("both", "left", "right", "smaller"))
    check_decay("adam_graft_b1", adam_graft_b1)
    average = None if b1 is None else momentum(b1)
    policy = as_policy(refresh, offset=0, first=False)
    if statistics_every is None:
        statistics_every = min(100, policy.schedule.period)
    preconditioned = precondition(
        average,
        refresh=policy,
        side=side,
        root=root,
        b2=b2,
        eps=eps,
        damping_mode=damping_mode,
        solver=solver,
        initial=eps if initial is None else initial,
        statistics_every=statistics_every,
        warmup_steps=warmup_steps,
        storage=storage,
    )
    if graft is None:
        return preconditioned
    if graft == "adam":
        moments = optax.scale_by_adam(adam_graft_b1, 0.999 if b2 is None else b2)  # pyright: ignore
        return graft_lengths(preconditioned, moments)
    return graft_lengths(preconditioned, average)
