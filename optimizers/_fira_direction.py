r"""Fira: GaLore with the rest of the gradient added: the direction."""

from __future__ import annotations

import jax
import optax

from ..transforms._validate import check_interval
from ..transforms.directions._carry import Carry
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.subspace._bases import BasisFinder, svd
from ..transforms.subspace._compensation import fira_compensation
from ..transforms.subspace._subspace import in_subspace


def scale_by_fira(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    gamma: jax.typing.ArrayLike = 1.01,
    plus: jax.typing.ArrayLike | None = None,
    residual: str = "complement",
    scale_compensation: bool = True,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """The direction of `fira` on batches of matrices `(..., m, n)`; see there."""
    check_interval("scale", scale, 0.0)
    return optax.chain(
        in_subspace(
            optax.scale_by_adam(b1, b2, eps),
            rank,
            basis=svd() if basis is None else basis,
            refresh=as_policy(refresh, offset=0),
            carry=carry,
            compensation=fira_compensation(scale, gamma, plus, residual, scale_compensation),
            side=side,
            clamp_rank=clamp_rank,
            seed=seed,
        ),
        optax.scale(scale),  # pyright: ignore[reportArgumentType]
    )
