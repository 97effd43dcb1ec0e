r"""ASGO: one-sided adaptive structured gradients."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._momentum import momentum
from ..transforms.kronecker._precondition import precondition
from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ..transforms.refresh._methods import RefreshMethod
from ..transforms.refresh._policy import Refresh, as_policy
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_asgo(
    *,
    b1: Decay | None = None,
    b2: Decay | None = None,
    eps: jax.typing.ArrayLike = 1e-6,
    refresh: Refresh = 1,
    method: str | RefreshMethod | None = None,
    variant: str = "practical",
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    limit: bool = False,
) -> optax.GradientTransformation:
    """The direction of `asgo` on batches of matrices `(..., m, n)`.

    `asgo` documents the arguments.
    """
    theoretical = variant == "theoretical"
    if theoretical and not (b1 is None and b2 is None and dtype is None):
        raise ValueError(
            "variant='theoretical' has no b1, b2 and dtype, got "
            f"b1={b1!r}, b2={b2!r}, dtype={dtype!r}."
        )
    if side is None:
        side = "left" if theoretical else "smaller"
    return precondition(
        None if theoretical else momentum(0.9 if b1 is None else b1, dtype=dtype),  # Alg. 2, line 6
        refresh=as_policy(refresh, offset=1, first=True),  # line 12
        side=side,  # line 7
        root=2,
        b2=None if theoretical else (0.95 if b2 is None else b2),  # lines 8, 10; Alg. 1, line 6
        eps=eps,
        damping_mode="outside" if theoretical else "absolute",  # line 13; Alg. 1, line 7
        method=method,
        statistics="momentum" if variant == "from_momentum" else "gradient",  # Eq. 4
        storage=storage,
        products=products,
        limit=limit,
    )


def asgo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay | None = None,
    b2: Decay | None = None,
    eps: jax.typing.ArrayLike = 1e-6,
    refresh: Refresh = 1,
    method: str | RefreshMethod | None = None,
    variant: str = "practical",
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    limit: bool = False,
    matrices: Matrices = "all",
    weight_dimension_numbers: Any = None,
    mesh: MeshLike = None,
    mesh_axis: MeshAxis = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    weights: str | Weights | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""ASGO: momentum preconditioned on its smaller side by the gradients' second moment.

    Use it instead of Shampoo when one factor is enough: it has half the state or less, and one root
    per matrix. By default it renews this root at every step. To renew it more seldom, give
    `refresh=` a period or `policies.foam(1, 0.4, max_damping=1e-5)`, which reached the same loss on
    a small model with a twelfth of the roots (docs/combinations.md).

    Start with 64 times a tuned AdamW's learning rate and a root at every step. On a language model
    it went further with `matrices=None`, `others` at 4 times and `eps=1e-10`
    (docs/choosing.md).

    .. math::
      M_t = b_1 M_{t-1} + (1-b_1) G_t, \qquad V_t = b_2 V_{t-1} + (1-b_2)\, G_t G_t^\top, \qquad
      D_t = (V_t + \epsilon I)^{-1/2} M_t

    This is for `m ≤ n`. Otherwise the root is on the right and `V` averages :math:`G^\top G`. For
    `m = n` the left side, the inputs, is the paper's "right": rows of its `W` are neurons. The
    averages have no bias correction. Every parameter is a matrix: a vector, bias or scale has one
    row and gets one adaptive number, as in AdaGrad-norm.

    With `refresh=1` the Frobenius norm of a direction is at most `C √min(m, n)`, where
    :math:`C = (1-b_1) / \sqrt{(1-b_2)(1-b_1^2/b_2)}`, 1.2 by default. A root that is older than the
    gradient has no such bound: the norm is at most :math:`\|M\|/\sqrt\epsilon`, unless
    `limit=True` bounds it as if the root contained every gradient.

    State per `m × n` matrix: `mn` for the momentum, in the eigenbasis of the factor, and
    `2 min(m, n)² + min(m, n)` for factor, basis and eigenvalues. Work per step:
    `6mn · min(m, n)` FLOPs; per refresh `2mn · min(m, n)`, and one eigendecomposition of order
    `min(m, n)` on CPUs, elsewhere `12 min(m, n)³` for each of two to six rotations.

    Relations, each with a test of the same name: `variant="from_momentum"` with `b2 = 0`,
    `eps = 0` and `refresh = 1` is exact Muon without Nesterov; transposing a non-square gradient
    transposes the direction.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum (0.9).
      b2: decay rate of the statistics (0.95).
      eps: damping, inside the root; with 0 the root is that of `V` on its range.
      refresh: period or policy of the root; period k is due at steps 1, k + 1, 2k + 1, …
      method: how a refresh renews the root, see `shampoo`; "theoretical" takes no stored roots but
        `eigenbases.stored_roots()`.
      variant: "practical" (Algorithm 2); "from_momentum" (Eq. 4: statistics of `M` instead of `G`);
        "theoretical" (Algorithm 1: sums, no momentum, left side, damping outside the root).
      storage: how factors and roots are stored; `dense()` by default.
      products: the precision of products, a level such as "bf16x3" or `curvax.products`.
      side: "left", "right" or "smaller" (left if square); `None` is "left" for "theoretical",
        otherwise "smaller".
      dtype: dtype of the momentum; the parameters' if `None`.
      limit: whether to shorten directions to the norm `√(min(m, n) / (1 - b2))`.
      matrices: see `muon`; "all", as in the paper, also for a `MatrixRule` without this field.
        `MatrixRule(head_wise=True)` is Appendix B; kernels whose heads are merged need
        `MatrixAxes(0, 1, column_heads=H)`.
      weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights, adam_learning_rate,
        others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate: with ten times AdamW's rate, take a
        tenth of its `weight_decay`; see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.asgo(0.01, refresh=10)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)

    References:
      An et al., `ASGO: Adaptive Structured Gradient Optimization
      <https://arxiv.org/abs/2503.20762>`_, Algorithms 1 and 2, Eq. 4, Appendix B.
    """
    return assemble(
        scale_by_asgo(
            b1=b1,
            b2=b2,
            eps=eps,
            refresh=refresh,
            method=method,
            variant=variant,
            storage=storage,
            products=products,
            side=side,
            dtype=dtype,
            limit=limit,
        ),
        learning_rate,
        matrices=as_rule(matrices, weight_dimension_numbers, matrices="all"),
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
