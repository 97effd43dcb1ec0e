r"""SUMO: orthogonalized momentum in a low-rank subspace: the direction."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_interval
from ..transforms.directions._carry import Carry, rotate
from ..transforms.directions._momentum import momentum
from ..transforms.directions._norm_growth import limit_norm_growth
from ..transforms.directions._orthogonalize import orthogonalize
from ..transforms.linalg._polar import Coefficients
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.subspace._bases import BasisFinder, randomized
from ..transforms.subspace._subspace import in_subspace


def scale_by_sumo(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 1.0,
    b1: jax.typing.ArrayLike = 0.95,
    accumulate: str = "sum",
    method: str = "qr_svd",
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    gamma: jax.typing.ArrayLike = 1.1,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "larger",
    clamp_rank: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """The direction of `sumo` on batches of matrices `(..., m, n)`; see there for the arguments."""
    check_interval("scale", scale, 0.0)
    return optax.chain(
        in_subspace(
            optax.chain(
                momentum(b1, accumulate=accumulate),
                orthogonalize(method, coefficients=coefficients, steps=steps),
                limit_norm_growth(gamma),
            ),
            rank,
            basis=randomized() if basis is None else basis,
            refresh=as_policy(refresh, offset=1),
            carry=rotate() if carry is None else carry,
            side=side,
            clamp_rank=clamp_rank,
            seed=seed,
        ),
        optax.scale(scale),  # pyright: ignore[reportArgumentType]
    )
