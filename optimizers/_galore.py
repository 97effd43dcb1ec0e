r"""GaLore: Adam in the gradient's leading singular subspace."""

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
from ..transforms.subspace._subspace import in_subspace
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_galore(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
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
    """The direction of `galore` on batches of matrices `(..., m, n)`.

    `galore` documents the arguments.
    """
    return optax.chain(
        in_subspace(
            adam(b1, b2, eps),  # Gong et al., Algorithm 8: Δ
            rank,
            basis=svd() if basis is None else basis,  # U
            refresh=as_policy(refresh, offset=0),  # t = 1 or t mod k = 0
            carry=carry,
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        optax.scale(scale),  # α  # pyright: ignore[reportArgumentType]
    )


def galore(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
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
    r"""GaLore: Adam in the gradient's leading singular subspace.

    Use it when Adam's state does not fit into memory: its moments are `r × n`. Until the next
    refresh it drops the part of the gradient outside the subspace; `fira` and `alice` use it.

    Start with 8 times a tuned AdamW's learning rate and a rank of half the width.

    .. math::
      \sigma = U^\top G, \qquad D = \alpha\, U\, \mathrm{Adam}(\sigma)

    `U` has the leading `r` left singular vectors of the gradient (the right ones if the right side
    is projected), computed at step 1 and at `t mod refresh = 0`. When `U` changes, Adam's moments
    stay as they are, and its bias correction keeps counting.

    State per `m × n` matrix, `m ≤ n`: `mr + 2nr` numbers. Work between refreshes: `4mnr` FLOPs.

    Relations, each with a test of the same name: at full rank with a fixed basis it is Adam in that
    basis; `alice` with GaLore's Adam and without tracking, switching and compensation is `galore`.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace, at most `min(m, n)` of each matrix.
      scale: the paper's α (0.25 at 1.3B parameters).
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
      >>> optimizer = curvax.galore(1e-2, rank=2)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Zhao et al., `GaLore <https://arxiv.org/abs/2403.03507>`_, 2024; as Algorithm 8 of Gong et
      al., `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_.
    """
    return assemble(
        scale_by_galore(
            rank=rank,
            scale=scale,
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
