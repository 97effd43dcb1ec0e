r"""KL-Shampoo: factors of whitened gradients, and eigenvalues that follow the gradient."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._moment_ratio import largest_ratio
from ..transforms.directions._momentum import momentum
from ..transforms.kronecker._eigenbasis import in_eigenbasis
from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._methods import BasisMethod
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_kl_shampoo(
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.98,
    initial: jax.typing.ArrayLike = 0.0,
    method: str | BasisMethod | None = None,
    skip_first: bool = False,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = 10,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "both",
    max_order: int | None = None,
) -> optax.GradientTransformation:
    """The direction of `kl_shampoo` on batches of matrices `(..., m, n)`.

    `kl_shampoo` documents the arguments, except `skip_first`: whether the first direction is 0, as
    in the official code.
    """
    policy = as_policy(refresh, offset=0, first=True)
    most = largest_ratio(b1, b2, policy.schedule.period, whitened=True)
    return in_eigenbasis(
        momentum(b1),  # M
        refresh=policy,
        side=side,
        max_order=max_order,
        b3=b2,
        statistics="kl",  # Lin et al.: L and R, whitened by each other
        initial=initial,
        divide=True,  # by the roots of d_L and d_R
        method=method,
        storage=storage,
        products=products,
        skip_first=skip_first,
        limit=most if limit is None else limit,
    )


def kl_shampoo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.98,
    initial: jax.typing.ArrayLike = 0.0,
    method: str | BasisMethod | None = None,
    limit: jax.typing.ArrayLike | None = None,
    refresh: Refresh = 10,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "both",
    max_order: int | None = None,
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
    r"""KL-Shampoo: Shampoo that estimates both factors together, without grafting.

    Use it in place of `shampoo` and `soap`: it has SOAP's work and `mn` numbers less state, and its
    directions have Adam's length. KL-SOAP is `soap(rate, statistics="kl")`.

    Start with 2 times a tuned AdamW's learning rate.

    .. math::
      L \leftarrow b_2 L + \tfrac{1-b_2}{n}\, G R^{-1} G^\top, \quad
      R \leftarrow b_2 R + \tfrac{1-b_2}{m}\, G^\top L^{-1} G, \quad
      D = U_L \frac{U_L^\top M U_R}{\sqrt{d_L d_R^\top}} U_R^\top

    `M` is the momentum with decay rate `b1`, `U` are the eigenvectors of `L` and `R` at `t = 1` and
    at `t mod refresh = 0`, used from that step on. The inverses are those of the step before, from
    the bases and the eigenvalues :math:`d_L` and :math:`d_R`, which are averaged with `b2` at
    every step (transforms/kronecker/_whitened.py).

    No direction has a root mean square above
    :math:`(1-b_1) \sqrt{b_2 / ((1-b_2)(b_2^2-b_1^2))}`, 1.8 by default (for :math:`b_1 < b_2`).
    While a basis stays, this is a bound of the formula.

    State per `m × n` matrix: `mn + 2m² + 2n² + m + n` numbers. Work between refreshes:
    `6mn(m + n)` FLOPs; for a refresh see `soap`. The official code's is `method="qr"`.

    Relations, each with a test of the same name: scaling the gradients does not change the
    direction; transposing the gradient transposes the direction; after one step it is
    `precondition` with whitened statistics.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      b2: decay rate of factors and eigenvalues.
      initial: factors and eigenvalues start at this number times the identity; 0 stands for the
        root of the first gradient's mean square, so that the gradient's scale does not matter. The
        official code has 0.1.
      method: `None`, "eigh", "qr", "rotations", or a value of `curvax.eigenbases`; see `soap`.
      limit: largest root mean square of a matrix's direction; longer ones are shortened. `None` is
        the bound above, but no limit with `refresh=1`.
      refresh: period or policy of the bases.
      storage: how factors and bases are stored; `dense()` by default.
      products: the precision of products, a level such as "bf16x3" or `curvax.products`.
      side: "both", "left", "right" or "smaller".
      max_order: sides of a larger order have no factor, as in `soap`, and the other side divides
        alone; `None` has factors of all.
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
      >>> optimizer = curvax.kl_shampoo(3e-3, refresh=10, weight_decay=0.01)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Lin et al., `Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization
      <https://arxiv.org/abs/2509.03378>`_, 2025.
    """
    return assemble(
        scale_by_kl_shampoo(
            b1=b1,
            b2=b2,
            initial=initial,
            method=method,
            limit=limit,
            refresh=refresh,
            storage=storage,
            products=products,
            side=side,
            max_order=max_order,
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
