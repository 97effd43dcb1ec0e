r"""Fira: GaLore with the rest of the gradient added."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms._carry import Carry
from ..transforms.directions._moment_ratio import adam
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.subspace._bases import BasisFinder, svd
from ..transforms.subspace._compensation import Compensation
from ..transforms.subspace._subspace import in_subspace
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_fira(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    compensation: str | Compensation | None = "fira",
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "smaller",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `fira` on batches of matrices `(..., m, n)`.

    `fira` documents the arguments.
    """
    return optax.chain(
        in_subspace(
            adam(b1, b2, eps),
            rank,
            basis=svd() if basis is None else basis,
            refresh=as_policy(refresh, offset=0),
            carry=carry,
            compensation=compensation,
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        optax.scale(scale),  # pyright: ignore[reportArgumentType]
    )


def fira(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    compensation: str | Compensation | None = "fira",
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "smaller",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
    matrices: Matrices = None,
    weight_dimension_numbers: Any = None,
    mesh: MeshLike = None,
    mesh_axis: MeshAxis = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    weights: str | Weights | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Fira: GaLore with the rest of the gradient added.

    Use it instead of `galore`: with one more number of state per matrix, it uses all of the
    gradient.

    Start with 8 times a tuned AdamW's learning rate and a rank of half the width.

    .. math::
      \sigma = U^\top G, \quad \Delta = \mathrm{Adam}(\sigma), \quad
      C = (G - U\sigma)\,\mathrm{diag}(\|\Delta_i\| / \|\sigma_i\|), \quad D = \alpha (U\Delta + C)

    with `U` as in `galore`. A limiter keeps ‖C‖ from growing by more than 1 % in a step.
    In `C`, columns with σ = 0 are 0. The longest update of a matrix is
    `learning_rate · α ρ √((m + r) n)` with Adam's longest entry ρ (1 at the first step; 7.3 for the
    default rates): ‖C‖ is at most `√(m/r) ‖Δ‖`, see the `limit` of `subspaces.fira`.

    State per `m × n` matrix, `m ≤ n`: `mr + 2nr + 1` numbers. Work between refreshes: `4mnr` FLOPs
    and a pass over the gradient.

    Relation, with a test of the same name: at full rank it is `galore`.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace, at most `min(m, n)` of each matrix.
      scale: GaLore's α.
      compensation: "fira", "fira+" (Fira+: ‖C‖ becomes 0.4 times the norm of the low-rank term),
        or a value such as `subspaces.fira(gamma=1.05)`. In the official code α does not multiply
        `C`, and the residual is `G - α U σ`: `subspaces.fira(residual=α, weight=1 / α)`.
      b1: Adam's first decay rate.
      b2: Adam's second decay rate.
      eps: Adam's epsilon.
      refresh: period of the basis, or a policy such as `policies.below_norm(…)`.
      basis: how to compute the basis; `None` is `subspaces.svd()`, the exact decomposition.
      carry: how moments follow a new basis; `None` is `subspaces.keep()`, as published.
      side: which side to project: "smaller" (left if square), "larger", "left" or "right"; "std" is
        that of the official code, see `in_subspace`.
      seed: of the random draws; 0 where nothing is drawn (see `in_subspace`).
      dtype: of the stored basis and moments: "bfloat16", as the papers count, "float32", or `None`:
        float32 at least. Moments are rounded at random, so that averages follow (`in_subspace`).
      matrices, weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights,
        adam_learning_rate, others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate: with ten times AdamW's rate, take a
        tenth of its `weight_decay`; see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.fira(1e-2, rank=2)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Chen et al., `Fira <https://arxiv.org/abs/2410.01623>`_, 2024; Fira+ in section F.7 of Gong
      et al., `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_.
    """
    return assemble(
        scale_by_fira(
            rank=rank,
            scale=scale,
            compensation=compensation,
            b1=b1,
            b2=b2,
            eps=eps,
            refresh=refresh,
            basis=basis,
            carry=carry,
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        learning_rate,
        guard=False,
        matrices=matrices,
        weight_dimension_numbers=weight_dimension_numbers,
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
