r"""DASGO: the diagonal variant of ASGO."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._diagonal import precondition_diagonal
from ..transforms.directions._momentum import momentum
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ..transforms.state._inject import scheduled
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_dasgo(
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    side: str = "left",
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `dasgo` on batches of matrices `(..., m, n)`.

    `dasgo` documents the arguments.
    """
    # Algorithm 3, lines 6 to 8
    return precondition_diagonal(momentum(b1, dtype=dtype), side=side, b2=b2, eps=eps)


def dasgo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    side: str = "left",
    dtype: jax.typing.DTypeLike | None = None,
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
    r"""DASGO: momentum with scaled rows, one adaptive number per input.

    Use it when ASGO's factors are too large: it needs hardly more memory than SGD with momentum,
    and no decomposition. Unlike ASGO it ignores correlations between rows.

    Start with 4 times a tuned AdamW's learning rate, and with `b1=0.8`.

    .. math::
      M_t = b_1 M_{t-1} + (1-b_1) G_t, \quad
      v_t = b_2 v_{t-1} + (1-b_2) \mathrm{diag}(G_t G_t^\top), \quad
      D_t = \mathrm{diag}(v_t + \epsilon)^{-1/2} M_t

    without bias correction. The side is the paper's, "right": rows of its `W` are neurons, so that
    its columns are the inputs, which are the rows here (`MatrixAxes`). Every parameter is a
    matrix: a vector, bias or scale has one row and gets one adaptive number. The authors' code
    leaves these and embeddings to AdamW (`matrices=None`), and gives each direction the root mean
    square 0.2 (`normalize_matrices(0.2)` behind `scale_by_dasgo`).

    State per `m × n` matrix: `mn + m` numbers. Work per step: two passes over the gradient.

    Relation, with a test of the same name: on a matrix with one column it is Adam without bias
    correction and with epsilon inside the root.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      b2: decay rate of the rows' sums of squares.
      eps: damping, inside the root.
      side: "left" (the inputs) or "right": a number per output.
      dtype: dtype of the momentum; the parameters' if `None`.
      matrices: see `muon`; "all", as in the paper, also for a `MatrixRule` without this field.
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
      >>> optimizer = curvax.dasgo(0.01)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      An et al., `ASGO: Adaptive Structured Gradient Optimization
      <https://arxiv.org/abs/2503.20762>`_, Algorithm 3.
    """
    return assemble(
        scale_by_dasgo(b1=b1, b2=b2, eps=eps, side=side, dtype=dtype),
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
