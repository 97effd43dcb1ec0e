r"""GaLore: Adam in the gradient's leading singular subspace."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._carry import Carry
from ..transforms.matrices._rule import MatrixRule, Selection
from ..transforms.refresh._policy import Refresh
from ..transforms.subspace._bases import BasisFinder
from ._assemble import MeshAxis, assemble
from ._galore_direction import scale_by_galore


def galore(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    refresh: Refresh = 200,
    basis: BasisFinder | None = None,
    carry: Carry | None = None,
    side: str = "smaller",
    clamp_rank: bool = True,
    seed: int = 0,
    matrices: Selection | None = None,
    weight_dimension_numbers: Any = None,
    stack: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    mesh_axis: MeshAxis = None,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""GaLore: Adam in the gradient's leading singular subspace.

    Use it when Adam's state does not fit: its moments are `r × n`. What lies outside the subspace
    is not learned from until the next refresh; `fira` and `alice` add it.

    .. math::
      \sigma = U^\top G, \qquad D = \alpha\, U\, \mathrm{Adam}(\sigma)

    with the leading `r` left singular vectors `U` of the gradient at step 1 and at `t mod refresh =
    0` (the right ones if the right side is projected), and Adam's bias correction by all steps. Its
    moments stay as they are when `U` changes.

    State per `m × n` matrix, `m ≤ n`: `mr + 2nr` numbers. Work between refreshes: `4mnr` FLOPs.

    Relations, each with a test of its name: at full rank with a fixed basis it is Adam in that
    basis; it is `alice` without tracking, switching and compensation, around GaLore's Adam.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace.
      scale: the paper's α (0.25 at 1.3B parameters).
      b1: Adam's first decay rate.
      b2: Adam's second decay rate.
      eps: Adam's epsilon.
      refresh: period of the basis, or a policy: `policies.below_norm`.
      basis: how it is found; `None` is `subspaces.svd()`, the exact decomposition.
      carry: what moments do when it changes; `None` is `subspaces.keep()`, as published.
      side: which side is projected: "smaller" (left if square), "larger", "left", "right", or
        "std": the official code's, which goes right if square.
      clamp_rank: take `min(m, n)` where the rank is above it; otherwise an error.
      seed: of random draws.
      matrices, weight_dimension_numbers, stack, mesh, mesh_axis, weight_decay, weight_decay_mask:
        see `muon`.
      adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_weight_decay: AdamW for other parameters.

    Returns:
      The transformation for the whole tree of parameters.

    Raises:
      ValueError: naming the argument or parameter that is not allowed.

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
            clamp_rank=clamp_rank,
            seed=seed,
        ),
        learning_rate,
        MatrixRule(matrices, weight_dimension_numbers),
        stack=stack,
        mesh=mesh,
        mesh_axis=mesh_axis,
        guard=False,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
    )
