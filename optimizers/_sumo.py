r"""SUMO: orthogonalized momentum in a low-rank subspace."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms._carry import Carry, rotate
from ..transforms.directions._momentum import momentum
from ..transforms.directions._norm_growth import limit_norm_growth
from ..transforms.directions._orthogonalize import PolarMethod, orthogonalize, scale_by_shape
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.subspace._bases import BasisFinder, randomized
from ..transforms.subspace._subspace import in_subspace
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_sumo(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 1.0,
    b1: Decay = 0.95,
    accumulate: str = "sum",
    method: str | PolarMethod = "qr_svd",
    gamma: jax.typing.ArrayLike = 1.1,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "larger",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `sumo` on batches of matrices `(..., m, n)`.

    `sumo` documents the arguments, except `accumulate`: "sum" (`b1 M + Ĝ`), or "ema" (Definition
    C.1), which has another moment and, up to rounding, the same direction.
    """
    return optax.chain(
        in_subspace(
            optax.chain(
                momentum(b1, accumulate=accumulate),  # Algorithm 1, block 2
                orthogonalize(method),  # O
                limit_norm_growth(gamma),  # block 3
            ),
            rank,
            basis=randomized() if basis is None else basis,  # block 1
            refresh=as_policy(refresh, offset=1),  # t mod K = 0, t from 0
            carry=rotate() if carry is None else carry,  # block 1.1
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        optax.scale(scale),  # block 4: α  # pyright: ignore[reportArgumentType]
    )


def sumo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 1.0,
    b1: Decay = 0.95,
    method: str | PolarMethod = "qr_svd",
    gamma: jax.typing.ArrayLike = 1.1,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "larger",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
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
    r"""SUMO: orthogonalized momentum in a low-rank subspace.

    Use it to get Muon's directions with a fraction of its state and work. It drops the part of the
    gradient outside of the subspace. At rank 8 of 128 it ended ahead of GaLore, LoRA and AdamW when
    a language model learned to classify, as in its paper, and behind them when the model learned
    another kind of text; from scratch, at half of the width, it was ahead of AdamW.

    Start with 8 times a tuned AdamW's learning rate, a rank of half the width and `b1=0.8`. On a
    language model it went further with `consistent_rms=0.2` at 4 times AdamW's rate
    (docs/choosing.md).

    .. math::
      \hat G = Q^\top G, \quad M \leftarrow b_1 M + \hat G, \quad O = U V^\top
      \text{ of } M = U \Sigma V^\top, \quad D = \alpha\, Q\, O

    `Q` is an orthonormal basis of the gradient's leading range, computed at steps 1, `refresh` + 1,
    …; the moment rotates with it, :math:`M \leftarrow (Q_{new}^\top Q_{old}) M`. As in the paper,
    the **larger** side is projected, so that `M` is `r × min(m, n)`. A limiter keeps ‖O‖ from
    growing by more than the factor γ in a step. With an exact method ‖O‖ is the square root of the
    rank of `M`, so the limiter acts only when this rank grows. Zero singular values stay zero.

    The paper's Definition C.1 projects both sides, :math:`Q^\top G R`, which contradicts its
    Algorithm 1, and is not here. The paper prints neither `b1` nor a period; the defaults are ours.

    State per `m × n` matrix, `m ≥ n`: `mr + nr + 1` numbers. Work between refreshes: `4mnr` FLOPs
    and an SVD of order `r`.

    Relation, with a test of the same name: at full rank and without momentum it is exact `muon`, if
    it projects the smaller side or refreshes the basis at every step.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace, at most `min(m, n)` of each matrix.
      scale: the paper's α (in its fine-tuning 4 at rank 4 and 2 at rank 8).
      b1: decay rate of the moment (μ).
      method: "qr_svd", "svd", "qdwh" or "newton_schulz", see `orthogonalize`, or a value of
        `curvax.polar`.
      gamma: largest growth of ‖O‖; infinity switches the limiter off.
      refresh: period of the basis, or a policy such as `policies.below_norm(…)`.
      basis: how to compute the basis; `None` is `subspaces.randomized()`, as published.
      carry: how the moment follows a new basis; `None` is `subspaces.rotate()`, as published.
      side: "larger" (left if square), "smaller", "left", "right" or "std", see `galore`.
      seed: of the random draws; 0 where nothing is drawn (see `in_subspace`).
      dtype: of the stored basis and moments: "bfloat16", as the papers count, "float32", or `None`:
        float32 at least. Moments are rounded at random, so that averages follow (`in_subspace`).
      consistent_rms: a number `c` scales directions by `c · √max(m, n)`, with 1 as the text on the
        paper's Block 4 says and its Algorithm 1 does not; `None` does not scale.
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
      >>> optimizer = curvax.sumo(1e-2, rank=2)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Refael et al., `SUMO <https://arxiv.org/abs/2505.24749>`_, 2025, Algorithm 1, Definition C.1.
    """
    direction = scale_by_sumo(
        rank=rank,
        scale=scale,
        b1=b1,
        method=method,
        gamma=gamma,
        refresh=refresh,
        basis=basis,
        carry=carry,
        side=side,
        seed=seed,
        dtype=dtype,
    )
    if consistent_rms is not None:
        direction = optax.chain(direction, scale_by_shape(consistent_rms))
    return assemble(
        direction,
        learning_rate,
        guard=False,
        projects=True,
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
