"""Moments of Optax's optimizers in the states of ours, so that a run goes on with another method.

`mu` and `nu` of Adam become those of Adam in `others`; `mu` of a matrix, of Adam or Muon, that of
`momentum`, which counts as one of gradients; `count` the counts of both, and of schedules.
Everything else starts anew: factors, bases and subspaces with the averages inside them, and base
optimizers, whose gradients are directions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._paths import named_leaves
from ..directions._blend import BlendState
from ..directions._momentum import SUM, MomentumState
from ..kronecker._eigenbasis import EigenbasisState
from ..matrices._form import MatrixForm
from ..matrices._view import MatrixViewState
from ..subspace._subspace import SubspaceState
from ..weights._averages import LookaheadState, PrimalAverageState
from ._portable import joined_state, place_state
from ._quantize_state import QuantizedState
from ._traced import by_parameter, is_view, nodes_in, traced

OURS = (MomentumState, optax.ScaleByAdamState)
AROUND = (  # whose counts are those of schedules, with other states inside
    optax.InjectStatefulHyperparamsState,
    LookaheadState,
    PrimalAverageState,
    BlendState,
)
IN_A_BASIS = (EigenbasisState, SubspaceState)  # whose moments are in other coordinates


def take_over(optimizer: Any, params: Any, state: Any) -> Any:
    """A new state that goes on with the moments of `optax.adamw` or `optax.contrib.muon`.

    Args:
      optimizer: the transformation that will use the result.
      params: its parameters.
      state: the state of an Optax optimizer for the same parameters, as its `init` and `update`
        give it: of Adam, AdamW, NAdam or Muon, also in a chain or a partition.

    Returns:
      The state of `optimizer`: moments that mean the same are those of `state`, schedules go on
      from its step, and everything else is as `optimizer.init` gives it.

    Raises:
      ValueError: if `state` has no moments, or lacks one of a parameter, as where a wrapper gives
        one of the optimizers another tree than `params`.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
      >>> before = optax.adamw(1e-3)
      >>> _, old = before.update(params, before.init(params), params)
      >>> after = curvax.muon(0.02, others=optax.adamw(1e-3))
      >>> state = curvax.take_over(after, params, old)
      >>> updates, state = jax.jit(after.update)(params, state, params)
    """
    whole = traced(optimizer, params)
    if SUM in whole.events:
        raise ValueError(
            "optimizer: its momentum must be an average to take over another one, with "
            "accumulate='ema'; with 'sum' it means something else."
        )
    averages = [*nodes_in(state, lambda x: {"count", "mu"} <= {*getattr(x, "_fields", ())})]
    if not averages:
        raise ValueError(
            "state: expected that of an Optax optimizer with mu and count, such as optax.adamw's, "
            f"as its init gives it; got {str(jax.tree.structure(state))[:80]}."
        )
    theirs = {
        (field, name): x
        for field in ("mu", "nu")
        for node in averages
        for name, x in named_leaves(getattr(node, field, ())).present().items()
    }
    step = functools.reduce(jnp.maximum, (node.count for node in averages))
    matrices = {form.parameter for form in whole.forms.values()}

    def moments(field: str, tree: Any, form: MatrixForm | None) -> Any:
        named, new = named_leaves(tree), {}
        for path, like in named.present().items():
            owner, shape = (form.parameter, form.shape) if form else (path, like.shape)
            moment = theirs.get((field, owner))
            if moment is None or moment.shape != shape:
                raise ValueError(
                    f"state has no {field} of {owner!r} with the shape {shape}, as optimizer has. "
                    "Treat parameters alike, by matrices= or weight_dimension_numbers=; of a "
                    "wrapper, such as optax.flatten, give the inner optimizer or its state."
                )
            moment = jnp.asarray(moment, like.dtype)
            new[path] = form.to_matrices(moment) if form else moment
        return named.rebuild(new)

    def continued(node: Any, form: MatrixForm | None) -> Any:
        if is_view(node):
            return MatrixViewState({n: over(x, whole.forms[n]) for n, x in node.inner.items()})
        if is_schedule(node):
            return node._replace(count=jnp.asarray(step, node.count.dtype))
        if type(node) in AROUND:
            inside = {x: over(y, form) for x, y in node._asdict().items() if x != "count"}
            return node._replace(count=jnp.asarray(step, node.count.dtype), **inside)
        if type(node) not in OURS:
            return node
        trees = {x: getattr(node, x) for x in ("mu", "nu") if hasattr(node, x)}
        if form is None and matrices & {*named_leaves(trees.get("mu")).present()}:
            return node  # of a base optimizer
        new = {field: moments(field, tree, form) for field, tree in trees.items()}
        return node._replace(count=jnp.asarray(step, node.count.dtype), **new)

    is_schedule = lambda node: getattr(node, "_fields", None) == ("count",)  # noqa: E731
    known = (*OURS, *AROUND, *IN_A_BASIS)
    is_part = lambda node: is_view(node) or is_schedule(node) or isinstance(node, known)  # noqa: E731

    def over(tree: Any, form: MatrixForm | None = None) -> Any:
        """A state, or that of the parameter of a form, with the old moments and step."""
        return jax.tree.map(functools.partial(continued, form=form), tree, is_leaf=is_part)

    fresh = optimizer.init(params)
    in_codes = [*nodes_in(fresh, lambda node: isinstance(node, QuantizedState))]
    if in_codes or not [*nodes_in(fresh, is_part)]:
        raise ValueError(
            "optimizer: its state has no moments that can go on: give the one inside flat_state, "
            "whose update takes the result, or inside quantize_state, whose codes start anew."
        )
    return place_state(optimizer, params, over(by_parameter(joined_state(whole, fresh))))
