r"""DR-Shampoo: Shampoo refreshed when its basis no longer diagonalizes the factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from ..transforms.directions._graft import Graft
from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._diagonal_residual import diagonal_residual
from ..transforms.refresh._methods import RefreshMethod
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble
from ._shampoo import scale_by_shampoo


@scheduled
def scale_by_dr_shampoo(
    *,
    check_every: int = 20,
    threshold: float = 0.1,
    b1: Decay | None = None,
    b2: Decay = 0.995,
    eps: jax.typing.ArrayLike = 1e-9,
    root: int = 2,
    method: str | RefreshMethod | None = None,
    graft: str | Graft | None = "adam",
    update_eigenvalues: bool = True,
    stagger: bool = False,
    bias_correction: bool = False,
    warmup_steps: int = 0,
    storage: Storage | None = None,
    products: str | Products | None = None,
) -> optax.GradientTransformation:
    """The direction of `dr_shampoo` on batches of matrices `(..., m, n)`.

    `dr_shampoo` documents the arguments, except `update_eigenvalues`: whether a check without
    refresh sets the eigenvalues to `diag(QᵀLQ)`. For `bias_correction` and `warmup_steps` see
    `scale_by_shampoo`.
    """
    return scale_by_shampoo(
        b1=b1,
        b2=b2,  # Nam and Ahn, Alg. 1, lines 5-6
        bias_correction=bias_correction,
        warmup_steps=warmup_steps,
        eps=eps,
        root=root,
        method=method,
        refresh=diagonal_residual(  # Appendices I and J.5
            check_every, threshold, update_eigenvalues=update_eigenvalues, stagger=stagger
        ),
        statistics_every=1,
        graft=graft,  # section J.1
        damping_mode="absolute",
        initial=0.0,  # Alg. 1, line 1
        storage=storage,
        products=products,
    )


def dr_shampoo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    check_every: int = 20,
    threshold: float = 0.1,
    b1: Decay | None = None,
    b2: Decay = 0.995,
    eps: jax.typing.ArrayLike = 1e-9,
    root: int = 2,
    method: str | RefreshMethod | None = None,
    graft: str | Graft | None = "adam",
    stagger: bool = False,
    base: Callable[[Any], optax.GradientTransformation] | None = None,
    storage: Storage | None = None,
    products: str | Products | None = None,
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
    r"""DR-Shampoo: refreshes a factor when `QᵀLQ` is too far from diagonal.

    Use it as the simple adaptive refresh to compare `foam` with. Its threshold does not depend on
    the scale of gradients, but a small residual does not bound the root's error: Nam and Ahn,
    Appendix I, give a family of 2 × 2 factors whose residual vanishes while the error does not.

    Start with a tuned AdamW's learning rate and `threshold=0.3`.

    .. math::
      \|\mathrm{off}(Q^\top L Q)\| > \tau\, \|Q^\top L Q\|

    The paper's ε is absolute, and meant for factors far below 1: in float32, roots raise
    eigenvalues to at least `12 eps` (1e-6) times the largest one. Where both factors have
    eigenvalues that are rounding noise, this noise is kept out of the direction
    (`transforms/kronecker/_roots.py`). Grafting bounds a direction's norm by Adam's.

    State per `m × n` matrix: `2(m² + n²) + m + n` numbers, and `2mn` for the grafted Adam. Work
    between checks: `6mn(m + n)` FLOPs; a check is a reduction of each factor.

    Relation, with a test of the same name: with a threshold next to 0 it is Shampoo refreshed at
    every check.

    Args:
      learning_rate: a number or a schedule.
      check_every: f, the period of checks, at steps 1, f + 1, …
      threshold: τ, the residual above which a factor is refreshed. 0.1 is our choice; Nam and Ahn
        run 0.25, 0.5 and 0.75 (ViT) and 0.4 (Conformer, GPT-2).
      b1: decay rate of an average of the gradients, which is preconditioned in place of the
        gradient, as in the authors' code (0.95); `None` does not average, as printed.
      b2: decay rate of the statistics and of the grafted Adam's second moment.
      eps: damping.
      root: p.
      method: how a refresh renews the eigenbases: `None`, "eigh", "qr", "rotations" or a value of
        `curvax.eigenbases`, see `shampoo`.
      graft: "adam", "norm", `None`, or a value such as `grafts.adam(b1=0.9)`.
      stagger: whether to spread the checks of the factors over the period.
      base, storage, products: see `shampoo`; `base=None` is plain descent.
      matrices, weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights,
        adam_learning_rate, others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate; see `muon`. Must be 0 with a `base`,
        which has its own; see `assemble` for traced numbers.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.dr_shampoo(1e-3, check_every=50, threshold=0.05)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Eschenhagen et al., Purifying Shampoo, 2025; Nam and Ahn, `FOAM
      <https://arxiv.org/abs/2606.02365>`_, Appendices I and J.5.
    """
    return assemble(
        scale_by_dr_shampoo(
            check_every=check_every,
            threshold=threshold,
            b1=b1,
            b2=b2,
            eps=eps,
            root=root,
            method=method,
            graft=graft,
            stagger=stagger,
            storage=storage,
            products=products,
        ),
        learning_rate,
        base=base,
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
