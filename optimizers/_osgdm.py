r"""OSGDM: momentum of orthogonalized gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from ..transforms.directions._momentum import descend_with_momentum
from ..transforms.directions._orthogonalize import PolarMethod, orthogonalize, scale_by_shape
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.state._inject import scheduled
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble, others_or_adamw


def scale_by_osgdm(
    *,
    method: str | PolarMethod = "svd",
) -> optax.GradientTransformation:
    """The orthogonalized gradient `O` of `osgdm`, without momentum.

    The momentum of `osgdm` accumulates steps, learning rate included. `osgdm` documents the
    arguments.
    """
    return orthogonalize(method)  # orth(G) in section 2 of SUMO's paper


def osgdm(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.9,
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
    r"""OSGDM: momentum of orthogonalized gradients.

    Use it to compare with `muon`, which orthogonalizes after the momentum. Here each gradient is
    orthogonalized before the momentum, so a noisy gradient adds a step as long as any other.

    Start with 16 times a tuned AdamW's learning rate, and with `b1=0.8`. On a language model
    it went further with `consistent_rms=0.2` at 4 times AdamW's rate (docs/choosing.md).

    .. math::
      O = U V^\top \text{ of } G = U \Sigma V^\top, \qquad M \leftarrow b_1 M + \mathrm{lr}\, O,
      \qquad W \leftarrow W - M - \mathrm{lr}\, \lambda W

    The momentum accumulates steps, learning rate included: under a schedule each `O` keeps the
    learning rate of its own step. `scale_by_osgdm` gives `O`, without momentum. Zero singular
    values stay zero.

    State per `m × n` matrix: `mn` numbers. Work per step: an SVD, or `steps · (4m²n + 2m³)` FLOPs
    of Newton-Schulz for `m ≤ n`.

    Relation, with a test of the same name: without momentum it is exact `muon` without momentum.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      method: "svd", "qr_svd", "qdwh" or "newton_schulz", see `orthogonalize`, or a value of
        `curvax.polar`.
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
      >>> optimizer = curvax.osgdm(1e-2)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Refael et al., `SUMO <https://arxiv.org/abs/2505.24749>`_, 2025, section 2.
    """
    descent = functools.partial(
        scheduled(descend_with_momentum),
        b1=b1,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )
    direction = scale_by_osgdm(method=method)
    if consistent_rms is not None:
        direction = optax.chain(direction, scale_by_shape(consistent_rms))
    return assemble(
        direction,
        learning_rate,
        base=descent,
        matrices=matrices,
        weight_dimension_numbers=weight_dimension_numbers,
        mesh=mesh,
        mesh_axis=mesh_axis,
        weights=weights,
        others=others_or_adamw(
            others, adam_learning_rate, learning_rate, weight_decay, weight_decay_mask, weights
        ),
    )
