r"""FOAM: Shampoo with adaptive damping between refreshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from ..transforms.directions._graft import Graft
from ..transforms.linalg._products import Products
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.refresh._foam import foam as foam_policy
from ..transforms.refresh._methods import RefreshMethod
from ..transforms.state._inject import scheduled
from ..transforms.storage._storage import Storage
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble
from ._shampoo import scale_by_shampoo


@scheduled
def scale_by_foam(
    *,
    check_every: int = 20,
    threshold: float = 0.75,
    max_damping: float = 3e-7,
    b1: Decay | None = None,
    b2: Decay = 0.995,
    eps: jax.typing.ArrayLike = 1e-9,
    root: int = 2,
    method: str | RefreshMethod | None = None,
    graft: str | Graft | None = "adam",
    stagger: bool = False,
    bias_correction: bool = False,
    warmup_steps: int = 0,
    storage: Storage | None = None,
    products: str | Products | None = None,
) -> optax.GradientTransformation:
    """The direction of `foam` on batches of matrices `(..., m, n)`.

    `foam` documents the arguments; for `bias_correction` and `warmup_steps` see `scale_by_shampoo`.
    """
    return scale_by_shampoo(
        b1=b1,
        b2=b2,  # Alg. 1, lines 5-6
        bias_correction=bias_correction,
        warmup_steps=warmup_steps,
        eps=eps,
        root=root,
        method=method,
        refresh=foam_policy(check_every, threshold, max_damping, stagger=stagger),  # Alg. 3
        statistics_every=1,
        graft=graft,  # section J.1
        damping_mode="absolute",
        initial=0.0,  # Alg. 1, line 1
        storage=storage,
        products=products,
    )


def foam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    check_every: int = 20,
    threshold: float = 0.75,
    max_damping: float = 3e-7,
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
    r"""FOAM: Shampoo that damps a stale root more, and refreshes it only when this is not enough.

    Use it when refreshes dominate Shampoo's time. Every `f` steps a check of each factor, which is
    kept in the eigenbasis of its last refresh, so that the check is a reduction, estimates the
    damping that keeps the error of the stale root at `threshold`. The factor is refreshed only if
    this damping exceeds `max_damping`. How many refreshes this saves depends on the scale of the
    gradients: `max_damping` is absolute, so tune it to the size of their second moments.

    Start with a tuned AdamW's learning rate and `graft=curvax.grafts.adam(0.8)`.

    .. math::
      h = \alpha\, \|E (Q^\top L Q - \mathrm{diag}(d)) E\| / p, \quad
      E = \mathrm{diag}(d+\epsilon)^{-1/2},
      \qquad \tilde\epsilon = \max(\epsilon_0, \epsilon h / \tau)

    The paper's ε is absolute, and meant for factors far below 1: in float32, roots raise
    eigenvalues to at least `12 eps` (1e-6) times the largest one. Where both factors have
    eigenvalues that are rounding noise, this noise is kept out of the direction
    (`transforms/kronecker/_roots.py`). Grafting bounds a direction's norm by Adam's.

    State per `m × n` matrix: `2(m² + n²) + m + n` numbers, and `2mn` for the grafted Adam. Work
    between checks: `6mn(m + n)` FLOPs. The state holds counters and the last `h` and ε of each
    factor (`state_of`). For the paper's ablations give `shampoo` the policy `curvax.policies.foam`
    with its options. The authors' code has more than the paper prints:
    `published.RUNS["foam-code/vit-imagenet"]`.

    Relations, each with a test of the same name: with an infinite threshold it is Shampoo refreshed
    once; with a threshold next to 0 it is Shampoo refreshed at every check (by the same method).

    Args:
      learning_rate: a number or a schedule.
      check_every: f, the period of checks, at steps 1, f + 1, …
      threshold: τ, the estimated error at which damping keeps a stale root.
      max_damping: ε_max, the damping above which a factor is refreshed instead.
      b1: decay rate of an average of the gradients, which is preconditioned in place of the
        gradient, as in the authors' code (0.95); `None` does not average, as printed.
      b2: decay rate of the statistics and of the grafted Adam's second moment.
      eps: ε0, the damping after a refresh.
      root: p; the paper does not give it, its code uses 2.
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
      >>> optimizer = curvax.foam(1e-3, check_every=50, threshold=0.4, max_damping=1e-7)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Nam and Ahn, `FOAM <https://arxiv.org/abs/2606.02365>`_, Algorithm 3, section 6, Appendix K.
    """
    return assemble(
        scale_by_foam(
            check_every=check_every,
            threshold=threshold,
            max_damping=max_damping,
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
