"""The shell of all full optimizers: routing, weight decay, learning rate, AdamW for others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import optax

from ..transforms._guard import guard_leaves
from ..transforms._validate import as_value, checked, concrete, shown
from ..transforms.directions._moment_ratio import adam
from ..transforms.directions._weight_decay import mask_of, optional_decay
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ..transforms.matrices._routing import route
from ..transforms.matrices._view import matrix_view
from ..transforms.weights._weights_side import Weights, on_weights
from ..transforms.weights._weights_values import WEIGHTS

MeshLike = Any  # a mesh, the shardings of the parameters on one, or None
MeshAxis = str | Sequence[str] | None
Decay = Any  # the decay rate of an average: a number, or a schedule


class _Full(optax.GradientTransformationExtraArgs):
    """The type of a full optimizer, by which `assemble` tells it from a direction."""


def assemble(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    *,
    base: Callable[[Any], optax.GradientTransformation] | None = None,
    guard: bool = True,
    projects: bool = False,
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
    """Makes a full optimizer from a direction. All methods of this package call it.

    Args:
      direction: transformation on batches of matrices, without learning rate, sign and weight
        decay: a `scale_by_<method>` or a chain of transformations.
      learning_rate: of the matrices; a number or a schedule.
      base: callable from a learning rate to an optimizer, which gets the direction as its gradient;
        `None` is plain descent with decoupled weight decay. With `weights` it runs on batches of
        matrices, as the direction does. Beside a base, `weight_decay` must be 0; a traced or
        injected number, which may change, decays all parameters, decoupled.
      guard, projects: see `on_matrices`.
      matrices, weight_dimension_numbers, mesh, mesh_axis, weight_decay, weight_decay_mask, weights,
        adam_learning_rate, others: see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument is not allowed; the message names it.

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
    if isinstance(direction, _Full) or not isinstance(direction, optax.GradientTransformation):
        kind = "a full optimizer" if isinstance(direction, _Full) else shown(direction)
        raise ValueError(
            "direction must be a transformation of matrices, such as curvax.scale_by_muon() or an "
            f"optax.chain; got {kind}."
        )
    rule = as_rule(matrices, weight_dimension_numbers)
    side = as_value("weights", weights, Weights, "curvax.weights.hyperball()", WEIGHTS)
    others = others_or_adamw(
        others, adam_learning_rate, learning_rate, weight_decay, weight_decay_mask, weights
    )
    if base is None:
        descent = optax.scale_by_learning_rate(learning_rate)
        if side is None:
            descent = optax.chain(_decayed_weights(weight_decay, weight_decay_mask), descent)
    elif concrete(weight_decay) not in (None, 0):
        raise ValueError(
            "weight_decay must be 0 with a base: give it to the base, as in "
            f"functools.partial(optax.adamw, weight_decay=0.1); got {weight_decay!r}."
        )
    else:
        descent = _decayed(
            _base(base, learning_rate), weight_decay, weight_decay_mask, learning_rate
        )
    # The routing has removed the output layer, and the embedding that identifies it.
    inside = dataclasses.replace(rule, output_layer=None)
    if side is not None:
        direction = optax.chain(direction, descent, on_weights(side, learning_rate))
        descent, projects = None, False  # it reads and writes all of a step
    view = matrix_view(
        direction, inside, guard=guard, projects=projects, mesh=mesh, mesh_axis=mesh_axis
    )
    updates = view if descent is None else optax.chain(view, descent)
    return _Full(*route(updates, guard_leaves(others), rule))


@checked
def others_or_adamw(
    others: optax.GradientTransformation | None,
    adam_learning_rate: optax.ScalarOrSchedule | None,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any,
    weight_decay_mask: Any,
    weights: Any = None,
) -> optax.GradientTransformation:
    """`others`; if that is `None`, AdamW.

    `assemble` calls it. `osgdm`, whose base applies the weight decay, calls it itself, so that all
    other parameters decay too.

    Raises:
      ValueError: if an argument is not allowed; the message names it.
    """
    # A number that is injected may be scheduled, and be 0 for a while.
    if (
        weight_decay_mask is not None
        and isinstance(weight_decay, (int, float))
        and not weight_decay
    ):
        raise ValueError(
            f"weight_decay_mask must be None with weight_decay=0, got {shown(weight_decay_mask)}."
        )
    if weights is not None and concrete(weight_decay) not in (None, 0):
        raise ValueError(
            "weight_decay must be 0 with weights: give it to weights, as in "
            "curvax.weights.decay(0.1), and to others, as in optax.adamw(1e-3, weight_decay=0.1); "
            f"got weight_decay={weight_decay!r}, weights={shown(weights)}."
        )
    if others is None:
        rate = learning_rate if adam_learning_rate is None else adam_learning_rate
        return optax.chain(
            adam(),
            _decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(rate),
        )
    if not isinstance(others, optax.GradientTransformation):
        raise ValueError(
            "others must be an Optax transformation, such as optax.adamw(1e-3), or None for AdamW; "
            f"got {others!r}."
        )
    if adam_learning_rate is not None:
        raise ValueError(
            "adam_learning_rate must be None with others, which has its own learning rate, as in "
            f"others=optax.adamw(1e-3); got {adam_learning_rate!r}."
        )
    return others


def _base(base: Any, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    made = base(learning_rate) if callable(base) else None
    if not isinstance(made, optax.GradientTransformation):
        is_made = isinstance(base, optax.GradientTransformation)
        kind = "an optimizer" if is_made else shown(base)
        gives = f", which gives {shown(made)}" if callable(base) else ""
        raise ValueError(
            "base must be a callable from a learning rate to an Optax transformation, such as "
            "optax.adamw or functools.partial(optax.adamw, weight_decay=0.1); got "
            f"{kind}{gives}."
        )
    return made


def _decayed(
    made: optax.GradientTransformation, weight_decay: Any, mask: Any, learning_rate: Any
) -> optax.GradientTransformation:
    """`made`, and decay by a number that only the running program knows, with the state of `made`.

    Raises:
      ValueError: if the rate is a schedule, whose step the state does not have.
    """
    if isinstance(weight_decay, (int, float)):
        return made
    if callable(learning_rate):
        raise ValueError(
            "weight_decay must be 0 with a base and a schedule as learning_rate; got "
            f"{shown(weight_decay)}. Give it to the base, or both numbers by inject_hyperparams."
        )
    decay = optax.add_decayed_weights(-learning_rate * weight_decay, mask_of(mask))
    made = optax.with_extra_args_support(made)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, state = made.update(updates, state, params, **extra_args)
        return decay.update(updates, decay.init(params), params)[0], state

    return optax.GradientTransformationExtraArgs(made.init, update)


def _decayed_weights(weight_decay: Any, mask: Any) -> optax.GradientTransformation:
    return optional_decay(weight_decay, optax.add_decayed_weights(weight_decay, mask_of(mask)))
