r"""Eigen-Adam: Adam in the eigenbasis of one side's second moment."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._methods import BasisMethod
from ..transforms.refresh._policy import Refresh
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike
from ._soap import scale_by_soap, soap


@scheduled
def scale_by_eigen_adam(
    *,
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    b3: Decay = 0.95,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    method: str | BasisMethod | None = None,
    skip_first: bool = False,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = 10,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "left",
) -> optax.GradientTransformation:
    """The direction of `eigen_adam` on batches of matrices `(..., m, n)`.

    `eigen_adam` documents the arguments, except `skip_first`: whether the first direction is 0, as
    in the official code.
    """
    return scale_by_soap(
        b1=b1,
        b2=b2,
        b3=b3,  # Alg. 7: Q; 0 in section B.6
        eps=eps,
        bias_correction=bias_correction,
        method=method,
        skip_first=skip_first,
        limit=limit,
        refresh=refresh,
        storage=storage,
        products=products,
        side=side,  # Alg. 7: U_f
    )


def eigen_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    b3: Decay = 0.95,
    eps: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    method: str | BasisMethod | None = None,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = 10,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "left",
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
    r"""Eigen-Adam: Adam in the eigenbasis of one side's second moment.

    Use it for most of the gain of `soap`, with less state and half the work. `side="smaller"` puts
    the basis on the smaller side.

    Start with 2 times a tuned AdamW's learning rate and `b1=0.8`.

    .. math::
      Q \leftarrow b_3 Q + (1-b_3) G G^\top, \quad v \leftarrow b_2 v + (1-b_2) (U^\top G)^2, \quad
      D = U \frac{U^\top M}{\sqrt v}

    `M` is the momentum with decay rate `b1`. The eigenvectors `U` of `Q` are computed at step 1 and
    at `t mod refresh = 0`, and used from that step on. By default the moments have no bias
    correction and nothing is added to the root; where `√v` is rounding noise, the ratio is 0 (see
    `moment_ratio`).

    No direction has a root mean square above :math:`(1-b_1) / \sqrt{(1-b_2)(1-b_1^2/b_2)}`, 1 by
    default (for :math:`b_1^2 < b_2`). While the basis stays, this is the bound of Adam's ratio. At
    a refresh `M` turns and `v` does not, so that the ratio alone has no bound.

    State per `m × n` matrix: `2mn + 2m²` numbers. Work between refreshes: `6m²n` FLOPs; a refresh
    turns one basis, see `soap`.

    Relations, each with a test of the same name: it is `soap` on one side; with `b3 = 0` and
    `refresh = 1` it is AdaDiag.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      b2: decay rate of the second moment.
      b3: decay rate of the factor; 0 is AdaDiag.
      eps: added to the root of the second moment.
      bias_correction: whether to correct both moments, as Adam does.
      method: `None`, "eigh", "qr", "rotations", or a value of `curvax.eigenbases`; see `soap`.
      limit: largest root mean square of a matrix's direction; longer ones are shortened. `None` is
        the bound above, but no limit with `refresh=1`, where the paper's trajectories exceed it.
      refresh: period or policy of the basis.
      storage: how factor and basis are stored; `dense()` by default.
      products: the precision of products, a level such as "bf16x3" or `curvax.products`.
      side: "both", "left", "right" or "smaller".
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
      >>> optimizer = curvax.eigen_adam(3e-3, refresh=10, weight_decay=0.01)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Gong et al., `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_,
      Algorithm 7, Eq. 13; AdaDiag in section B.6.
    """
    return soap(
        learning_rate,
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        bias_correction=bias_correction,
        method=method,
        limit=limit,
        refresh=refresh,
        storage=storage,
        products=products,
        side=side,
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
