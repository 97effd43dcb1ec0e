"""What every full optimizer shares: routing, weight decay, learning rate, AdamW for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from ..transforms._guard import guard_leaves
from ..transforms._validate import check_decay, check_interval
from ..transforms.matrices._routing import route
from ..transforms.matrices._rule import MatrixRule
from ..transforms.matrices._view import on_matrices

MeshAxis = str | Sequence[str] | None


def assemble(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    rule: MatrixRule | None = None,
    *,
    base: Callable[[Any], optax.GradientTransformation] | None = None,
    block_size: int | None = None,
    stack: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    mesh_axis: MeshAxis = None,
    guard: bool = True,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps: Any = 1e-8,
    adam_weight_decay: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes a full optimizer from the direction of the matrices: what every method here is.

    Args:
      direction: transformation on batches of matrices, without learning rate, sign and decay: a
        `scale_by_<method>`, or a chain of parts.
      learning_rate: of the matrices; a number or a schedule.
      rule: which parameters are matrices; `MatrixRule()` by default.
      base: from a learning rate to the optimizer that takes the direction as its gradient; `None`
        is plain descent with decoupled weight decay.
      block_size: see `on_matrices`.
      stack: see `on_matrices`.
      mesh: see `on_matrices`.
      mesh_axis: see `on_matrices`.
      guard: see `on_matrices`.
      weight_decay: decoupled weight decay of the matrices, times the learning rate.
      weight_decay_mask: tree of booleans or callable, as in `optax.add_decayed_weights`.
      adam_learning_rate: of all other parameters; `None` means as the matrices.
      adam_b1: AdamW's decay rate of the first moment.
      adam_b2: AdamW's decay rate of the second moment.
      adam_eps: AdamW's epsilon.
      adam_weight_decay: AdamW's weight decay; `None` means as the matrices.

    Returns:
      A transformation on the whole tree of parameters.

    Raises:
      ValueError: naming the argument that is not allowed.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> moments = curvax.moment_ratio(0.9, 0.95)
      >>> eigen = curvax.in_eigenbasis(moments, refresh=curvax.every(10))
      >>> low_rank_soap = curvax.in_subspace(
      ...     eigen, rank=2, basis=curvax.subspaces.svd(), refresh=curvax.every(100)
      ... )
      >>> optimizer = curvax.assemble(low_rank_soap, 0.01, weight_decay=0.1)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    """
    rule = MatrixRule() if rule is None else rule
    if not isinstance(rule, MatrixRule):
        raise ValueError(f"rule must be a MatrixRule, got {rule!r}.")
    adam_learning_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    adam_weight_decay = weight_decay if adam_weight_decay is None else adam_weight_decay
    _check_learning_rate("learning_rate", learning_rate)
    _check_learning_rate("adam_learning_rate", adam_learning_rate)
    check_interval("weight_decay", weight_decay, 0.0)
    check_interval("adam_weight_decay", adam_weight_decay, 0.0)
    check_decay("adam_b1", adam_b1)
    check_decay("adam_b2", adam_b2)
    check_interval("adam_eps", adam_eps, 0.0)
    if base is None:
        descent = optax.chain(
            optax.add_decayed_weights(weight_decay, weight_decay_mask)
            if _decays(weight_decay)
            else optax.identity(),
            optax.scale_by_learning_rate(learning_rate),
        )
    elif isinstance(weight_decay, (int, float)) and weight_decay != 0:
        raise ValueError(
            "weight_decay must be 0 with a base, which does its own (such as "
            f"functools.partial(optax.adamw, weight_decay=0.1)); got {weight_decay!r}."
        )
    else:
        descent = _base(base, learning_rate)
    # Behind the routing the output layer is gone already, and so is what it would be found by.
    inside = dataclasses.replace(rule, output_layer=None)
    matrices = optax.chain(
        on_matrices(
            direction,
            inside,
            block_size=block_size,
            stack=stack,
            guard=guard,
            mesh=mesh,
            mesh_axis=mesh_axis,
        ),
        descent,
    )
    adam = {"b1": adam_b1, "b2": adam_b2, "eps": adam_eps}
    others = (
        optax.adamw(
            adam_learning_rate, weight_decay=adam_weight_decay, mask=weight_decay_mask, **adam
        )
        if _decays(adam_weight_decay)
        else optax.adam(adam_learning_rate, **adam)
    )
    return route(matrices, guard_leaves(others), rule)


def _base(base: Any, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    made = base(learning_rate) if callable(base) else base
    if not (callable(base) and isinstance(made, optax.GradientTransformation)):
        raise ValueError(
            "base must be a callable from a learning rate to an Optax transformation, such as "
            f"optax.adamw; got {base!r}, which gives {made!r}."
        )
    return made


def _decays(weight_decay: Any) -> bool:
    # An injected hyper-parameter is an array and may change later; a plain 0 needs no parameters.
    return not (isinstance(weight_decay, (int, float)) and weight_decay == 0)


def _check_learning_rate(name: str, value: optax.ScalarOrSchedule) -> None:
    if not callable(value):
        check_interval(name, value, 0.0)
