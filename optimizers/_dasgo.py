r"""DASGO: the diagonal variant of ASGO."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._diagonal import precondition_columns
from ..transforms.directions._momentum import momentum
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ._assemble import MeshAxis, assemble


def scale_by_dasgo(
    *,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `dasgo` on batches of matrices `(..., m, n)`.

    `dasgo` documents the arguments.
    """
    return precondition_columns(momentum(b1, dtype=dtype), b2=b2, eps=eps)


def dasgo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    dtype: jax.typing.DTypeLike | None = None,
    matrices: Matrices = "all",
    weight_dimension_numbers: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    mesh_axis: MeshAxis = None,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DASGO: momentum with scaled columns, one adaptive number per output.

    Use it when ASGO's factors are too large: it needs hardly more memory than SGD with momentum,
    and no decomposition. Unlike ASGO it ignores correlations between columns.

    Start with 4 times a tuned AdamW's learning rate, and with `b1=0.8`.

    .. math::
      M_t = b_1 M_{t-1} + (1-b_1) G_t, \quad
      v_t = b_2 v_{t-1} + (1-b_2) \mathrm{diag}(G_t^\top G_t), \quad
      D_t = M_t\, \mathrm{diag}(v_t + \epsilon)^{-1/2}

    always on the right side, without bias correction. Every parameter is a matrix: a vector, bias
    or scale has one row, for which DASGO is Adam without bias correction.

    State per `m × n` matrix: `mn + n` numbers. Work per step: two passes over the gradient.

    Relation, with a test of the same name: on a matrix with one row it is Adam without bias
    correction and with epsilon inside the root.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      b2: decay rate of the columns' sums of squares.
      eps: damping, inside the root.
      dtype: dtype of the momentum; the parameters' if `None`.
      matrices: see `muon`; "all", as in the paper, also for a `MatrixRule` without this field.
      weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, adam_learning_rate, others: see
        `muon`.
      weight_decay: decoupled, multiplied by the learning rate: with ten times AdamW's rate, take a
        tenth of its `weight_decay`; see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.dasgo(0.01)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      An et al., `ASGO: Adaptive Structured Gradient Optimization
      <https://arxiv.org/abs/2503.20762>`_, Algorithm 3.
    """
    return assemble(
        scale_by_dasgo(b1=b1, b2=b2, eps=eps, dtype=dtype),
        learning_rate,
        matrices=as_rule(matrices, weight_dimension_numbers, matrices="all"),
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
