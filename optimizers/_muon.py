r"""Muon: orthogonalized momentum."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._momentum import momentum
from ..transforms.directions._neurons import normalize_neurons
from ..transforms.directions._orthogonalize import PolarMethod, orthogonalize, scale_by_shape
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.state._inject import scheduled
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_muon(
    *,
    b1: Decay = 0.95,
    nesterov: bool = True,
    accumulate: str = "ema",
    method: str | PolarMethod = "newton_schulz",
    adaptive: bool = False,
    b2: Decay | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `muon` on batches of matrices `(..., m, n)`, not scaled by their shape.

    `muon` documents the arguments.
    """
    return optax.chain(
        momentum(  # Gong et al., Eq. 33; An et al., Eq. 11, is the form "sum"
            b1,
            accumulate=accumulate,
            nesterov=nesterov,
            bias_correction=accumulate == "ema",
            dtype=dtype,
        ),
        orthogonalize(method, adaptive=adaptive),  # U Vᵀ
        *(() if b2 is None else (normalize_neurons(b2),)),  # NorMuon's Algorithm 1
    )


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.95,
    nesterov: bool = True,
    accumulate: str = "ema",
    method: str | PolarMethod = "newton_schulz",
    adaptive: bool = False,
    b2: Decay | None = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
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
    r"""Muon: momentum, orthogonalized by Newton-Schulz iteration.

    Use it for the hidden matrices of transformers; it needs as much state as SGD with momentum.
    Embeddings, norms and biases go to AdamW. Do not take it for convolutions: on one of the two
    networks of `docs/choosing.md` it gained little, and only if tuned; on the other it came last.

    Start with `curvax.muon(0.03)`. Rates from 0.032 to 0.064 were best for language models of all
    sizes and lengths, and all other parameters may have the same rate (docs/start.md). In runs of
    250 steps `b1=0.9` gained 0.02 to 0.03 more. When fine-tuning start with a rate of 0.01, and
    give all other parameters AdamW's: `others=optax.adamw(rate)`.

    .. math::
      M_t = b_1 M_{t-1} + (1 - b_1) G_t, \qquad
      \hat M_t = b_1 \frac{M_t}{1 - b_1^{t+1}} + (1 - b_1) \frac{G_t}{1 - b_1^t}, \qquad
      D_t = U V^\top \;\text{for}\; \hat M_t = U \Sigma V^\top

    That is Nesterov momentum; with `nesterov=False`, :math:`\hat M_t = M_t / (1 - b_1^t)`.
    Then :math:`W \leftarrow W - \mathrm{lr} \, (\sqrt{\max(1, n/m)}\, D_t + \lambda W)`.

    State per `m × n` matrix: `mn` numbers. Work per step for `m ≤ n`: `steps · (4m²n + 2m³)` FLOPs,
    or `8m²n + 28m³` with five steps if `n ≥ 2m`.

    Relation, with a test of the same name: on trees of 2-D leaves it equals `optax.contrib.muon`
    step for step. It differs in three points: it recognizes matrices by path as well as by
    shape (biases and embeddings with two axes go to AdamW, attention kernels are merged, `weight`
    is `(out, in)`);
    `weight_decay` also applies to the parameters that go to AdamW
    (`others=optax.adamw(rate, weight_decay=0)` switches that off); of the forms of
    `preconditioning`, `polar.newton_schulz(norm=…)` has all but "spectral".

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum: a number, or a schedule, as every `b1`, `b2` and `b3` of a
        method may be. (A schedule has a count in the state.)
      nesterov: whether to use Nesterov momentum, as in the formula.
      accumulate: "ema" (the average of the formula) or "sum" (`b1 M + G`, and with Nesterov that
        once more).
      method: "newton_schulz", "svd" (exact), "qr_svd" or "qdwh", see `orthogonalize`; or a value of
        `curvax.polar`, such as `polar.newton_schulz(4, coefficients="turbo_muon", norm="aol")`.
      adaptive: whether to multiply each direction by its inner product with the momentum, about the
        sum of its singular values, as in Optax.
      b2: decay rate of a second moment for each output, by whose root its column is divided
        (NorMuon, see `normalize_neurons`); `None` has none.
      consistent_rms: a number `c` scales directions by `c · √max(m, n)` instead of `√max(1, n/m)`.
      dtype: dtype of the momentum; the parameters' if `None`.
      matrices: which parameters are matrices: `None` is the rule of
        `MatrixRule`; "all", path patterns or
        a predicate select them. A `MatrixRule` also splits kernels into heads or blocks and says
        which matrices share an array.
      weight_dimension_numbers: axes of the matrices, see `MatrixRule`.
      mesh: devices to distribute the matrices over, see `on_matrices`.
      mesh_axis: the mesh axis or axes to distribute them along; all by default.
      weight_decay: decoupled weight decay of the matrices and the default `others`, a number or a
        schedule, multiplied by the learning rate: with ten times AdamW's rate, take a tenth of its
        `weight_decay`. For a decay that does not depend on the peak of a schedule, divide it by the
        peak; for one that does not depend on the rate at all, chain
        `optax.add_decayed_weights(-decay)` after it.
      weight_decay_mask: which parameters decay, as in `optax.adamw`.
      weights: what a step does with the matrices beside the direction, in place of `weight_decay`:
        a value of `curvax.weights`, such as `weights.decay(0.1, cautious=True)`; "hyperball" or
        "brake". A matrix is one of those that `matrices` makes, such as a head. All other
        parameters have no part in it: give their decay to `others`.
      adam_learning_rate: learning rate of the default `others`; `None` takes `learning_rate`.
      others: Optax transformation for all parameters that are not matrices, such as
        `optax.adamw(1e-3, b1=0.8)`; `None` is AdamW with Optax's defaults and `weight_decay`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

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
      Li et al., `NorMuon <https://arxiv.org/abs/2510.05491>`_, 2025 (`b2`);
      head-wise query and key: An et al., `ASGO <https://arxiv.org/abs/2503.20762>`_, Fig. 6b.
    """
    direction = optax.chain(
        scale_by_muon(
            b1=b1,
            nesterov=nesterov,
            accumulate=accumulate,
            method=method,
            adaptive=adaptive,
            b2=b2,
            dtype=dtype,
        ),
        scale_by_shape(consistent_rms),
    )
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
