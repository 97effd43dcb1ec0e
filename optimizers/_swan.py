r"""SWAN: normalized and whitened gradients, without any state."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms._trees import in_float32
from ..transforms.directions._normalize import standardize_rows
from ..transforms.directions._orthogonalize import PolarMethod, orthogonalize, scale_by_shape
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.weights._weights_side import Weights
from ._assemble import MeshAxis, MeshLike, assemble


def scale_by_swan(
    *,
    method: str | PolarMethod = "svd",
) -> optax.GradientTransformation:
    """The direction of `swan` on batches of matrices `(..., m, n)`.

    `swan` documents the arguments.
    """
    # In a narrower dtype, rounding makes the centered rows less orthogonal to (1, …, 1).
    return in_float32(
        optax.chain(
            standardize_rows(),  # Eq. 30
            orthogonalize(method),  # Eq. 31
        ),
        "swan",
    )


def swan(
    learning_rate: optax.ScalarOrSchedule,
    *,
    method: str | PolarMethod = "svd",
    consistent_rms: jax.typing.ArrayLike | None = None,
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
    r"""SWAN: normalized and whitened gradients, without any state.

    Use it when you have no memory for state. It has no momentum and therefore suffers more from
    small batches than other methods.

    Start with a learning rate of 0.13, with 0.06 for fine-tuning, and with AdamW's own for the
    other parameters: `others=optax.adamw(rate)`. With
    `method=curvax.polar.newton_schulz(norm="gram", eps=0.0)` it takes Muon's products in place of
    an SVD: a shorter step, and nearly the same loss (docs/choosing.md).

    .. math::
      \tilde G = (G - \mathrm{mean}) / \mathrm{std} \text{ of each row}, \qquad
      D = (\tilde G \tilde G^\top)^{-1/2} \tilde G

    The root is a pseudo-inverse: zero singular values stay zero. Rows of one entry, as of a kernel
    with one output, have no mean to subtract, and become their signs. State: none. Work per step:
    an SVD, or with "newton_schulz" `steps · (4m²n + 2m³)` FLOPs for `m ≤ n`, as many as
    Newton-Schulz on the root of :math:`\tilde G \tilde G^\top` takes (section B.8).

    Relations, each with a test of the same name: the direction does not change if the gradient is
    scaled, or if a constant is added to a row with several entries.

    Args:
      learning_rate: a number or a schedule.
      method: "svd" (exact), "qr_svd", "qdwh" or "newton_schulz", see `orthogonalize`, or a value of
        `curvax.polar`. The paper iterates:
        `polar.newton_schulz(coefficients=(1.5, -0.5, 0.0), norm="gram", eps=0.0)`.
      consistent_rms: a number `c` scales directions by `c · √max(m, n)`; `None` does not scale.
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
      >>> optimizer = curvax.swan(1e-3)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Ma et al., `SWAN <https://arxiv.org/abs/2412.13148>`_, 2024; as Eqs 30-32 and section B.8 of
      Gong et al., `Towards Efficient Optimizer Design <https://arxiv.org/abs/2502.07752>`_.
    """
    direction = scale_by_swan(method=method)
    if consistent_rms is not None:
        direction = optax.chain(direction, scale_by_shape(consistent_rms))
    return assemble(
        direction,
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
