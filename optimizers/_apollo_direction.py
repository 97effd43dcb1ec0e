r"""Apollo: gradients scaled by Adam in a random subspace: the direction."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_choice, check_interval
from ..transforms.directions._norm_growth import limit_norm_growth
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.subspace._bases import gaussian, svd
from ..transforms.subspace._compensation import channel_scaling
from ..transforms.subspace._subspace import in_subspace


def scale_by_apollo(
    *,
    rank: int = 128,
    variant: str = "random",
    scale: jax.typing.ArrayLike = 1.0,
    sqrt_scale: bool = False,
    gamma: jax.typing.ArrayLike | None = None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """The direction of `apollo` on batches of matrices `(..., m, n)`; see there."""
    check_choice("variant", variant, ("random", "svd", "mini"))
    mini = variant == "mini"
    check_interval("scale", scale, 0.0)
    return optax.chain(
        in_subspace(
            optax.scale_by_adam(b1, b2, eps),
            1 if mini else rank,
            basis=svd() if variant == "svd" else gaussian(kept=False),
            refresh=as_policy(refresh, offset=0),
            compensation=channel_scaling(whole=mini),
            side=side,
            clamp_rank=clamp_rank,
            seed=seed,
        ),
        optax.identity() if gamma is None else limit_norm_growth(gamma),
        optax.scale(scale**0.5 if sqrt_scale else scale),  # pyright: ignore[reportArgumentType]
    )
