r"""Muon: orthogonalized momentum."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._orthogonalize import scale_by_shape
from ..transforms.linalg._polar import Coefficients
from ..transforms.matrices._rule import MatrixRule, Selection
from ._assemble import MeshAxis, assemble
from ._muon_direction import scale_by_muon


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: jax.typing.ArrayLike = 0.95,
    nesterov: bool = True,
    accumulate: str = "ema",
    method: str = "newton_schulz",
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    eps: jax.typing.ArrayLike = 1e-8,
    consistent_rms: jax.typing.ArrayLike | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    head_wise: bool = False,
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
    r"""Muon: momentum, orthogonalized by Newton-Schulz iteration.

    Use it for the hidden matrices of transformers and convolutional nets: state like momentum
    SGD's. Not for embeddings, norms and biases, which go to AdamW here.

    .. math::
      M_t = b_1 M_{t-1} + (1 - b_1) G_t, \qquad \hat M_t = U \Sigma V^\top, \qquad D_t = U V^\top

    where :math:`\hat M_t` is bias-corrected and, with Nesterov, mixed once more with :math:`G_t`.
    Then :math:`W \leftarrow W - \mathrm{lr} \, (\sqrt{\max(1, n/m)}\, D_t + \lambda W)`.

    State per `m × n` matrix: `mn` numbers. Work per step: `steps · (4m²n + 2m³)` FLOPs for `m ≤ n`;
    from `n = 2m` on `8m²n + 28m³` for five steps.

    Relations, each with a test of its name: equals `optax.contrib.muon` step for step on trees of
    2-D leaves. What differs from it: parameters are chosen by Flax path as well as shape (biases
    and embeddings of two axes go to AdamW, attention kernels are merged), `adam_weight_decay=None`
    means `weight_decay` instead of 0; `adaptive` and other preconditionings are not offered.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      nesterov: whether to use Nesterov momentum.
      accumulate: "ema" (bias-corrected average) or "sum" (`b1 M + G`).
      method: "newton_schulz", "svd" (exact) or "qdwh".
      coefficients: "quintic" (Muon's), "classical", "polar_express", or rows of three numbers.
      steps: Newton-Schulz iterations.
      eps: added to the norm by which Newton-Schulz divides.
      consistent_rms: `c` scales directions by `c · √max(m, n)` in place of `√max(1, n/m)`.
      dtype: dtype of the momentum; the parameters' if `None`.
      head_wise: whether query and key kernels `(D, H, K)` are one matrix per head.
      matrices: which parameters are matrices; `None` is the rule for Flax, see `MatrixRule`.
      weight_dimension_numbers: axes of the matrices, see `MatrixRule`.
      stack: whether same-shaped matrices share one array; `None` decides by size.
      mesh: devices among which the matrices are divided; see `on_matrices`.
      mesh_axis: the axis or axes of the mesh along which they are; all by default.
      weight_decay: decoupled weight decay, times the learning rate.
      weight_decay_mask: which parameters decay, as in `optax.adamw`.
      adam_learning_rate: AdamW's learning rate for other parameters; `None` means the same.
      adam_b1: AdamW's first decay rate.
      adam_b2: AdamW's second decay rate.
      adam_eps: AdamW's epsilon.
      adam_weight_decay: AdamW's weight decay; `None` means the same.

    Returns:
      The transformation for the whole tree of parameters.

    Raises:
      ValueError: naming the argument or parameter that is not allowed.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.muon(0.02, weight_decay=0.1)
      >>> state = optimizer.init(params)
      >>> updates, state = jax.jit(optimizer.update)(params, state, params)
      >>> params = optax.apply_updates(params, updates)

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024; Liu et al., `Muon
      is scalable for LLM training <https://arxiv.org/abs/2502.16982>`_, 2025 (`consistent_rms`);
      head-wise query and key: An et al., `ASGO <https://arxiv.org/abs/2503.20762>`_, Fig. 6b.
    """
    direction = optax.chain(
        scale_by_muon(
            b1=b1,
            nesterov=nesterov,
            accumulate=accumulate,
            method=method,
            coefficients=coefficients,
            steps=steps,
            eps=eps,
            dtype=dtype,
        ),
        scale_by_shape(consistent_rms),
    )
    return assemble(
        direction,
        learning_rate,
        MatrixRule(matrices, weight_dimension_numbers, head_wise),
        stack=stack,
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
    )
