r"""Alice: low-rank Eigen-Adam with tracking, switching and compensation: the direction."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_interval
from ..transforms.directions._carry import Carry
from ..transforms.directions._moment_ratio import moment_ratio
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.subspace._bases import BasisFinder, switching_named
from ..transforms.subspace._compensation import Compensation, compensation_named
from ..transforms.subspace._subspace import in_subspace


def scale_by_alice(
    *,
    rank: int = 128,
    leading: int = 40,
    scale: jax.typing.ArrayLike = 0.3,
    compensation_scale: jax.typing.ArrayLike = 0.4,
    gamma: jax.typing.ArrayLike = 1.01,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.9,
    b3: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    tracking: bool = True,
    switching: str | BasisFinder = "complement",
    compensation: str | Compensation | None = "optimal",
    refresh: Refresh = 200,
    carry: Carry | None = None,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """The direction of `alice` on batches of matrices `(..., m, n)`; see there."""
    check_interval("scale", scale, 0.0)
    return optax.chain(
        in_subspace(
            moment_ratio(b1, b2, eps, bias_correction=bias_correction),
            rank,
            basis=switching_named(switching, leading),
            refresh=as_policy(refresh, offset=0),
            carry=carry,
            compensation=compensation_named(compensation, b1, gamma, compensation_scale),
            tracking=tracking,
            b3=b3,
            side=side,
            clamp_rank=clamp_rank,
            seed=seed,
        ),
        optax.scale(scale),  # pyright: ignore[reportArgumentType]
    )
