r"""APOLLO: gradients scaled by Adam in a random subspace."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._moment_ratio import adam
from ..transforms.directions._norm_growth import limit_norm_growth
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.subspace._bases import BasisFinder, gaussian
from ..transforms.subspace._compensation import channel_scaling
from ..transforms.subspace._subspace import in_subspace
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_apollo(
    *,
    rank: int = 128,
    basis: BasisFinder | None = None,
    whole: bool = False,
    scale: jax.typing.ArrayLike = 1.0,
    gamma: jax.typing.ArrayLike | None = None,
    limit: jax.typing.ArrayLike = 1.0,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    side: str = "smaller",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `apollo` on batches of matrices `(..., m, n)`.

    `apollo` documents the arguments.
    """
    return optax.chain(
        in_subspace(
            adam(b1, b2, eps),  # Gong et al., Algorithm 9: Δ
            rank,
            basis=gaussian(kept=False) if basis is None else basis,  # U
            refresh=as_policy(refresh, offset=0),  # t = 1 or t mod k = 0
            compensation=channel_scaling(whole=whole, limit=limit),  # S
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        optax.identity() if gamma is None else limit_norm_growth(gamma),
        optax.scale(scale),  # α  # pyright: ignore[reportArgumentType]
    )


def apollo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    basis: BasisFinder | None = None,
    whole: bool = False,
    scale: jax.typing.ArrayLike = 1.0,
    gamma: jax.typing.ArrayLike | None = None,
    limit: jax.typing.ArrayLike = 1.0,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
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
    r"""APOLLO: gradients scaled by Adam in a random subspace.

    Use it for Adam-like steps with little more memory than SGD: a low-rank Adam only determines the
    length of each column's step.

    Start with 4 times a tuned AdamW's learning rate; a quarter of the width is rank enough.

    .. math::
      \sigma = U^\top G, \quad \Delta = \mathrm{Adam}(\sigma), \quad
      D = \alpha\, G\, \mathrm{diag}(\|\Delta_i\| / \|\sigma_i\|)

    The entries of `U` have variance `1/r`. They are redrawn at step 1 and at `t mod refresh = 0`,
    and regenerated from their key at all other steps. Columns with σ = 0 give 0. The longest update
    of a matrix is `learning_rate · α ρ √(mn)`, Adam's, with its longest entry ρ (1 at the first
    step; 7.3 for the default rates), because D has at most the norm `√(m/r) ‖Δ‖`. Embeddings,
    norms, biases and the output layer go to AdamW.

    State per `m × n` matrix, `m ≤ n`: `2nr` numbers, and `mr` for a basis of the gradient. Work
    between refreshes: `2mnr` FLOPs and drawing `mr` numbers.

    Relation, with a test of the same name: on matrices of one column, Apollo-mini is Apollo.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace, at most `min(m, n)` of each matrix.
      basis: how to compute the subspace; `None` is `subspaces.gaussian(kept=False)`, drawn at
        random. The paper also has `subspaces.svd()`.
      whole: whether to use one scale `‖Δ‖ / ‖σ‖` per matrix. Apollo-mini is `rank=1, whole=True`.
      scale: α; √α in the official code.
      gamma: largest growth of the direction's norm from one step to the next (1.01 in the official
        code); `None`, as in the paper, does not limit it.
      limit: largest norm of D over `α √(m/r) ‖Δ‖`; longer ones are shortened. Infinity is the
        paper's form, whose columns with a tiny σ have no bound.
      b1: Adam's first decay rate.
      b2: Adam's second decay rate.
      eps: Adam's epsilon.
      refresh: period of the subspace.
      side: which side to project: "smaller" (left if square), "larger", "left" or "right"; "std" is
        that of the official code, see `in_subspace`.
      seed: of the random draws.
      dtype: of the stored basis and moments: "bfloat16", as the papers count, "float32", or `None`:
        float32 at least. Moments are rounded at random, so that averages follow (`in_subspace`).
      matrices: see `muon`. The output layer goes to AdamW; `MatrixRule(output_layer=None)` makes
        it a matrix.
      weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights, adam_learning_rate,
        others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate: with ten times AdamW's rate, take a
        tenth of its `weight_decay`; see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.apollo(1e-2, rank=2)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Zhu et al., `APOLLO <https://arxiv.org/abs/2412.05270>`_, 2024; as Algorithm 9 of Gong et al.,
      `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_.
    """
    return assemble(
        scale_by_apollo(
            rank=rank,
            basis=basis,
            whole=whole,
            scale=scale,
            gamma=gamma,
            limit=limit,
            b1=b1,
            b2=b2,
            eps=eps,
            refresh=refresh,
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        learning_rate,
        guard=False,
        projects=True,
        matrices=as_rule(matrices, weight_dimension_numbers, output_layer="auto"),
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
