r"""Shampoo: gradients preconditioned from both sides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from ..transforms._validate import as_value
from ..transforms.directions._graft import GRAFTS, Graft
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
def scale_by_shampoo(
    *,
    b2: Decay | None = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    root: int = 4,
    refresh: Refresh = 500,
    statistics_every: int | None = None,
    graft: str | Graft | None = "norm",
    b1: Decay | None = None,
    statistics: str = "gradient",
    damping_mode: str = "relative",
    initial: jax.typing.ArrayLike | None = None,
    method: str | RefreshMethod | None = None,
    side: str = "both",
    bias_correction: bool = False,
    warmup_steps: int = 0,
    storage: Storage | None = None,
    products: str | Products | None = None,
) -> optax.GradientTransformation:
    """The direction of `shampoo` on batches of matrices `(..., m, n)`.

    `shampoo` documents the arguments, except two. `warmup_steps` is the number of first steps that
    only update statistics: their direction is Adam's with `graft="adam"`, otherwise 0, and the
    refreshes count from their end. For `bias_correction` see `precondition`; statistics then start
    at 0, and `initial` must be 0 or None.
    """
    grafted: Graft | None = as_value("graft", graft, Graft, "curvax.grafts.adam(b1=0.9)", GRAFTS)
    average = None if b1 is None else momentum(b1)
    policy = as_policy(refresh, offset=0, first=False)  # Li et al., Alg. 2, line 9
    if statistics_every is None:
        schedule = policy.schedule
        # Roots between statistics, as at step 1, would be those of damping alone.
        between = schedule.first or schedule.stagger or schedule.offset % schedule.period
        period: int = 1 if between else schedule.period
        statistics_every = period // 5 if period >= 500 else period  # section C.3
    start = 0.0 if bias_correction and statistics != "kl" else eps
    preconditioned = precondition(
        average,
        refresh=policy,
        side=side,
        root=root,
        b2=b2,  # Alg. 2, lines 4-5
        bias_correction=bias_correction,
        eps=eps,
        damping_mode=damping_mode,  # line 11
        method=method,
        initial=start if initial is None else initial,  # input: L0 = εI
        statistics=statistics,
        statistics_every=statistics_every,  # line 3
        warmup_steps=warmup_steps,
        storage=storage,
        products=products,
        limit=grafted is not None and grafted.limits,
    )
    if grafted is None:
        return preconditioned
    return grafted.around(preconditioned, average, b2, warmup_steps)  # line 15


_SGD = functools.partial(optax.sgd, momentum=0.9)


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b2: Decay | None = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    root: int = 4,
    refresh: Refresh = 500,
    statistics_every: int | None = None,
    graft: str | Graft | None = "norm",
    base: Callable[[Any], optax.GradientTransformation] | None = _SGD,
    b1: Decay | None = None,
    statistics: str = "gradient",
    damping_mode: str = "relative",
    initial: jax.typing.ArrayLike | None = None,
    method: str | RefreshMethod | None = None,
    storage: Storage | None = None,
    products: str | Products | None = None,
    side: str = "both",
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
    r"""Shampoo: gradients preconditioned from both sides, grafted onto a base optimizer.

    Use it when curvature matters and you have memory for two factors; `asgo` needs half the state.
    Until the first refresh, at step 500 by default, it equals its base optimizer. The defaults are
    those of the 4-bit paper for small images, but for the `method`: there it is "coupled_newton".
    The original Shampoo is `b2=None, damping_mode="floor", refresh=1, statistics_every=1,
    graft=None, base=None`.

    Start with a tuned AdamW's learning rate, `base=optax.adamw` and `refresh=10`.

    .. math::
      L \leftarrow b_2 L + (1-b_2) G G^\top, \quad R \leftarrow b_2 R + (1-b_2) G^\top G, \quad
      \hat G = \hat L\, G\, \hat R, \quad D = \hat G\, \|G\| / \|\hat G\|

    with :math:`\hat L = (L + \epsilon \lambda_{\max} I)^{-1/p}`, and `R` alike. Statistics start at
    `L = εI` and are updated at `t mod statistics_every = 0`. Roots start at the identity and are
    computed at `t mod refresh = 0`.

    Grafting bounds a direction's norm by :math:`\|G\|`, or by Adam's. With `graft=None` and roots
    that contain the gradient it is at most :math:`\sqrt{\min(m, n) / (1-b_2)}`; a root that is
    older has no bound: after 30 first steps of zeros, when statistics are only `εI`, a gradient
    became 2,200 times as long. `graft="limit"` keeps the bound with any root.

    State per `m × n` matrix: `2(m² + n²) + m + n` numbers, and the base's. Work between refreshes:
    `4mn(m + n)` FLOPs, half as much again when statistics are due; a refresh decomposes both
    factors on CPUs, and takes products elsewhere (see `soap`). With roots that are stored, such as
    by `method="products"`, a step has `2mn(m + n)` FLOPs less: take it where refreshes are rare.

    Relations, each with a test of the same name: grafted and never refreshed, it is its base;
    transposing the gradient transposes the direction.

    Args:
      learning_rate: a number or a schedule.
      b2: decay rate of the statistics; `None` sums them.
      eps: damping, and the default of `initial`.
      root: p, 4 (Shampoo) or 2 (Shampoo²).
      refresh: period or policy of the roots.
      statistics_every: T1, steps between updates of the statistics; `None` is the period T2 of the
        roots, or a fifth of it from 500 on, as in the paper: 100 of 500, 200 of 1000, 200 of 200;
        and 1 with `every(T2)`, staggered or with another `first` or `offset`, whose roots of the
        first steps need statistics.
      graft: length of the direction: "norm" (the gradient's), "adam" (Adam's), `None` (its own),
        "limit" (its own, up to the norm `√(min(m, n) / (1 - b2))`; p must be 4, or see
        `precondition` for "kl"), or `grafts.adam(b1=0.9)`.
      base: callable from a learning rate to an optimizer, such as `optax.adamw`, which gets the
        direction as its gradient; `None` is plain descent with `weight_decay`.
      b1: decay rate of an average of the gradients, which is preconditioned in place of the
        gradient; `None` does not average.
      statistics: of the "gradient" or the "momentum" with `b1`, or "kl": of the gradient whitened
        by the other side's root. KL-Shampoo from roots is `statistics="kl", root=2, initial=0.0,
        graft=None, base=None, refresh=curvax.every(10)`; `kl_shampoo` works in eigenbases.
      damping_mode: "relative", "absolute", "floor" or "outside", see `precondition`.
      initial: the statistics start at this number times the identity; `None` is `eps`.
      method: how a refresh renews the eigenbases that roots are made of: "eigh", "qr", "rotations"
        or a value of `curvax.eigenbases`; `None` is "eigh" in programs for CPUs, otherwise
        "rotations". Or "products", "coupled_newton", "newton_schulz", `eigenbases.stored_roots()`:
        roots are stored, and solved for as `inverse_root` does.
      storage: how factors and roots are stored; `dense()` by default.
      products: the precision of products, a level such as "bf16x3" or `curvax.products`.
      side: "both", "left", "right" or "smaller".
      matrices: see `muon`. Matrices are cut into blocks of at most 1200 rows and columns, each
        grafted separately; `MatrixRule(block_size=None)` does not cut.
      weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights, adam_learning_rate,
        others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate; see `muon`. Must be 0 with a `base`,
        which has its own; see `assemble` for traced numbers.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.shampoo(1e-3, refresh=20, statistics_every=1, base=optax.adamw)
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

    References:
      Li et al., `Memory-Efficient 4-bit Preconditioned Stochastic Optimization
      <https://arxiv.org/abs/2412.10663>`_, Algorithm 2; Gupta et al., `Shampoo
      <https://arxiv.org/abs/1802.09568>`_, 2018.
    """
    return assemble(
        scale_by_shampoo(
            b2=b2,
            eps=eps,
            root=root,
            refresh=refresh,
            statistics_every=statistics_every,
            graft=graft,
            b1=b1,
            statistics=statistics,
            damping_mode=damping_mode,
            initial=initial,
            method=method,
            side=side,
            storage=storage,
            products=products,
        ),
        learning_rate,
        base=base,
        matrices=as_rule(matrices, weight_dimension_numbers, block_size=1200),
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
