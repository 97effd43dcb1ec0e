r"""Alice: low-rank Eigen-Adam with tracking, switching and compensation."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms._carry import Carry
from ..transforms._validate import as_value
from ..transforms.directions._moment_ratio import moment_ratio
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.subspace._bases import SWITCHING, BasisFinder
from ..transforms.subspace._compensation import Compensation, as_compensation
from ..transforms.subspace._subspace import in_subspace
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble

EXAMPLE = "curvax.subspaces.complement(leading=20)"


@scheduled
def scale_by_alice(
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    b1: Decay = 0.9,
    b2: Decay = 0.9,
    b3: Decay | None = 0.999,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    switching: str | BasisFinder = "complement",
    compensation: str | Compensation | None = "optimal",
    refresh: Refresh = 200,
    carry: Carry | None = None,
    side: str = "smaller",
    seed: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `alice` on batches of matrices `(..., m, n)`.

    `alice` documents the arguments.
    """
    return optax.chain(
        in_subspace(
            moment_ratio(b1, b2, eps, bias_correction=bias_correction),  # Alg. 4, lines 13-15
            rank,
            basis=as_value("switching", switching, BasisFinder, EXAMPLE, SWITCHING),  # line 7
            refresh=as_policy(refresh, offset=0),  # line 5
            carry=carry,
            compensation=as_compensation(compensation, b1),  # line 16
            b3=b3,  # lines 6 and 12
            side=side,
            seed=seed,
            dtype=dtype,
        ),
        optax.scale(scale),  # line 17: α  # pyright: ignore[reportArgumentType]
    )


def alice(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 128,
    scale: jax.typing.ArrayLike = 0.3,
    b1: Decay = 0.9,
    b2: Decay = 0.9,
    b3: Decay | None = 0.999,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    switching: str | BasisFinder = "complement",
    compensation: str | Compensation | None = "optimal",
    refresh: Refresh = 200,
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
    r"""Alice: low-rank Eigen-Adam with tracking, switching and compensation.

    Use it to come close to a full-rank method with about GaLore's state. `b3=None` is Alice-0.

    Start with 8 times a tuned AdamW's learning rate and a rank of half the width.

    .. math::
      \sigma = U^\top G, \quad \tilde Q \leftarrow b_3 \tilde Q + (1-b_3)\, \sigma\sigma^\top, \quad
      \omega = M / \sqrt v, \quad D = \alpha (U \omega + \alpha_c C)

    `M` and `v` are the moments of σ (decay rates `b1` and `b2`), and
    :math:`C = \eta\sqrt{m-r}\,(G - U\sigma)\,\mathrm{diag}(p)^{-1/2}` is the compensation of
    `subspaces.optimal`. At step 1 and at `t mod refresh = 0` the basis is refreshed: it becomes the
    exact eigenvectors of :math:`b_3\, U \tilde Q U^\top + (1-b_3)\, GG^\top` at step 1, and takes
    one step of subspace iteration on this matrix later. Then, at step 1 too, it is switched: the
    leading columns stay, and the others are drawn from the orthogonal complement. Moments and
    :math:`\tilde Q` stay as they are. Where `√v` is rounding noise, ω is 0; columns with `p ≤ 0`
    have no compensation.

    State per `m × n` matrix, `m ≤ n`: `mr + 2nr + n + r² + 1` numbers, without `r²` for Alice-0.
    Work between refreshes: `4mnr + 2nr²` FLOPs and a pass over the gradient.

    Relations, each with a test of the same name: with GaLore's Adam and without tracking, switching
    and compensation it is `galore`; at full rank with a fixed basis it is `eigen_adam` in that
    basis.

    Args:
      learning_rate: a number or a schedule.
      rank: dimension of the subspace, at most `min(m, n)` of each matrix.
      scale: the paper's α (0.25 at 1.3B parameters).
      b1: decay rate of the first moment and of `p`.
      b2: decay rate of the second moment.
      b3: decay rate of Q̃, the second moment of σ, which is kept for the next basis; `None` keeps
        none. It must be `None` with "gaussian".
      eps: added to `√v`.
      bias_correction: whether to correct both moments, as Adam does.
      switching: "complement", "full_basis", "gaussian_mix", "gaussian", "none" (subspace iteration
        alone), "evd" (exact eigenvectors), or a basis such as `subspaces.complement(leading=20)`.
        The first three keep 40 leading columns.
      compensation: "optimal", "fira", "fira+", `None`, or a value such as
        `subspaces.optimal(weight=0.2)`; the weight is the paper's α_c (0.4; 0.2 at 1.3B).
      refresh: period of the basis.
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
      >>> optimizer = curvax.alice(1e-2, rank=2, switching=curvax.subspaces.complement(1))
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Gong et al., `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_,
      Algorithms 2, 3, 4 and 10, Theorem 5.1, section F.7.
    """
    return assemble(
        scale_by_alice(
            rank=rank,
            scale=scale,
            b1=b1,
            b2=b2,
            b3=b3,
            eps=eps,
            bias_correction=bias_correction,
            switching=switching,
            compensation=compensation,
            refresh=refresh,
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
