r"""SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._moment_ratio import largest_ratio, moment_ratio
from ..transforms.kronecker._eigenbasis import in_eigenbasis
from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._methods import BasisMethod
from ..transforms.refresh._policy import Refresh, as_policy, every
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble

GROWING = every(10, first="growing")
"""Every third step at first, as short runs need it; every tenth from step 700 on."""


@scheduled
def scale_by_soap(
    *,
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    b3: Decay = 0.95,
    statistics: str = "gradient",
    initial: jax.typing.ArrayLike = 0.0,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    method: str | BasisMethod | None = None,
    skip_first: bool = False,
    lagged: bool = False,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = GROWING,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "both",
    max_order: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `soap` on batches of matrices `(..., m, n)`.

    `soap` documents the arguments, except three: `initial`, the factors start at this number times
    the identity; `skip_first`, whether the first direction is 0, and `lagged`, whether a step uses
    the bases that the step before left, both as in the official code.
    """
    policy = as_policy(refresh, offset=0, first=True)  # Gong et al., Alg. 6: t = 1 or t mod K = 0
    return in_eigenbasis(
        moment_ratio(b1, b2, eps, bias_correction=bias_correction, dtype=dtype),  # Alg. 6: m, v
        refresh=policy,
        side=side,
        max_order=max_order,
        b3=b3,  # Alg. 6: L, R
        statistics=statistics,
        initial=initial,
        method=method,
        storage=storage,
        products=products,
        skip_first=skip_first,
        lagged=lagged,
        limit=largest_ratio(b1, b2, policy.schedule.period) if limit is None else limit,
    )


def soap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    b3: Decay = 0.95,
    statistics: str = "gradient",
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    method: str | BasisMethod | None = None,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = GROWING,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "both",
    max_order: int | None = None,
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
    r"""SOAP: Adam in the eigenbases of Shampoo's factors.

    Use it for Adam's step sizes along directions that fit the loss better than single entries do.
    It has Shampoo's factors and bases and Adam's moments, and more work between refreshes than
    Shampoo. `eigen_adam` rotates one side only.

    Start with `curvax.soap(0.01)`. Rates from 0.008 to 0.016 were best for language models of all
    sizes and lengths, and all other parameters may have the same rate (docs/start.md).

    .. math::
      L \leftarrow b_3 L + (1-b_3) G G^\top, \quad R \leftarrow b_3 R + (1-b_3) G^\top G, \quad
      v \leftarrow b_2 v + (1-b_2) (U_L^\top G U_R)^2, \quad
      D = U_L \frac{U_L^\top M U_R}{\sqrt v} U_R^\top

    `M` is the momentum with decay rate `b1`. The eigenvectors `U` of `L` and `R` are computed at
    step 1 and at `t mod refresh = 0`, and used from that step on. By default the period is
    `min(10, 3 + t // 100)`: short runs need 3 (with 10, a run of 250 steps lost a quarter of its
    gain over AdamW, one of 500 steps 6 %), and long runs do not. `refresh=10` is the period of the
    official code from the first step on. By default the moments have no
    bias correction and nothing is added to the root; where `√v` is rounding noise, the ratio is 0
    (see `moment_ratio`). In float32 the first direction of a Gaussian 32 × 32 gradient is within
    1 % of the exact one; `skip_first` of `scale_by_soap` omits it.

    No direction has a root mean square above :math:`(1-b_1) / \sqrt{(1-b_2)(1-b_1^2/b_2)}`, 1 by
    default (for :math:`b_1^2 < b_2`). While a basis stays, this is the bound of Adam's ratio. At a
    refresh `M` turns and `v` does not, so that an entry may have a moment and no variance: after
    pauses (a gradient at every fifth step) the unlimited direction reached 3 to 6 with
    `refresh=10`, with a median of 0.19.

    The factors are kept in their bases, :math:`U_L^\top L U_L`, and a refresh turns both: in
    programs for CPUs to the eigenvectors, by a decomposition, and in programs for GPUs and TPUs by
    rotations, which follow the factors by products alone until one is short. Momentum turns along,
    `v` stays. A checkpoint moves between them. transforms/kronecker/_eigenbasis.py tells a step
    with a refresh in order, transforms/linalg/_turns.py has its formulas and the loop of rotations.

    State per `m × n` matrix: `2mn + 2m² + 2n²` numbers, without the square of a side above
    `max_order`. Work between refreshes: `6mn(m + n)` FLOPs; a refresh has `12(m³ + n³)` for each
    rotation and `4mn(m + n)`.

    Relations, each with a test of the same name: with identity bases it is Adam without bias
    correction; on one side it is `eigen_adam`; transposing the gradient transposes the direction.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      b2: decay rate of the second moment.
      b3: decay rate of the factors; 0 is AdaDiag++.
      statistics: of the "gradient", as in the formula, or "kl": of the gradient whitened by the
        other side's factor, as in `kl_shampoo`. This is KL-SOAP.
      eps: added to the root of the second moment.
      bias_correction: whether to correct both moments, as Adam does.
      method: how a refresh turns a basis: "eigh"; "qr": after a first `eigh`, orthogonal iteration
        from the last basis, as in the official code; "rotations"; or a value of
        `curvax.eigenbases`. `None` is "eigh" in programs for CPUs, otherwise "rotations".
        Eigenvalue-corrected Shampoo is `method=eigenbases.qr(10),
        refresh=policies.diagonal_residual(1, 0.01), bias_correction=True, eps=1e-8`.
      limit: largest root mean square of a matrix's direction; longer ones are shortened. `None` is
        the bound above, but no limit with `refresh=1`, where the paper's trajectories exceed it.
      refresh: period or policy of the bases, by default `curvax.every(10, first="growing")`.
      storage: how factors and bases are stored; `dense()` by default.
      products: the precision of products, a level such as "bf16x3" or `curvax.products`.
      side: "both", "left", "right" or "smaller".
      max_order: sides of a larger order have no factor and are not rotated, such as the vocabulary
        of a head, as with `max_precond_dim` of the official code, 10,000 there; `None` rotates all.
        Two arrays of order 32,000 take 8 GB.
      dtype: dtype of the stored momentum; `None` is that of the parameters, at least float32.
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
      >>> optimizer = curvax.soap(0.01, weight_decay=0.01)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Vyas et al., `SOAP <https://arxiv.org/abs/2409.11321>`_, 2024; as Algorithm 6 of Gong et al.,
      `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_; KL-SOAP: Lin et al.,
      2025 (see `kl_shampoo`); warm QR: Eschenhagen et al., `Purifying Shampoo
      <https://arxiv.org/abs/2506.03595>`_, 2025.
    """
    return assemble(
        scale_by_soap(
            b1=b1,
            b2=b2,
            b3=b3,
            statistics=statistics,
            eps=eps,
            bias_correction=bias_correction,
            method=method,
            limit=limit,
            refresh=refresh,
            storage=storage,
            products=products,
            side=side,
            max_order=max_order,
            dtype=dtype,
        ),
        learning_rate,
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
