"""Moments of Optax's optimizers in the states of ours, so that a run goes on with another method.

| theirs | ours |
|---|---|
| `mu` and `nu` of Adam | those of Adam in `others` |
| `mu` of Adam or Muon, of a matrix | that of `momentum`, cut into matrices |
| `count` | the counts of both, and of schedules |

A `momentum` counts as one of gradients, which it is in all methods. Everything else starts anew:
factors, bases and subspaces with what is averaged inside them, and base optimizers, whose gradients
are directions.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._own_state import arrays_in
from .._paths import named_leaves
from ..directions._momentum import Accumulation, MomentumState
from ..kronecker._eigenbasis import EigenbasisState
from ..matrices._form import MatrixForm
from ..subspace._subspace import SubspaceState
from ._portable import by_parameter, joined_state, place_state
from ._traced import is_view, traced

FIELD = re.compile(r"(?:^|/)(mu|nu|count)(?=/|$)")


class _Theirs(NamedTuple):
    moments: dict[tuple[str, str], Any]  # by field and parameter
    count: Any


def take_over(optimizer: Any, params: Any, state: Any) -> Any:
    """A new state that goes on with the moments of `optax.adamw` or `optax.contrib.muon`.

    Args:
      optimizer: the transformation that will use the result.
      params: its parameters.
      state: the state of an Optax optimizer for the same parameters: of Adam, AdamW, NAdam or Muon,
        also in a chain or a partition.

    Returns:
      The state of `optimizer`: moments that mean the same are those of `state`, schedules go on
      from its step, and everything else is as `optimizer.init` gives it.

    Raises:
      ValueError: if `state` has no moments, or lacks one of a parameter; the message names it.

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
    if Accumulation("sum") in whole.events:
        raise ValueError(
            "optimizer: its momentum must be an average to take over another one, with "
            "accumulate='ema'; with 'sum' it means something else."
        )
    forms = {form.name: form for groups in whole.groups for g in groups for form in g.members}
    theirs = _moments(state, named_leaves(params).names)
    own = by_parameter(whole.stacks, joined_state(whole, optimizer.init(params)))
    parameters = frozenset(form.parameter for form in forms.values())
    inside = functools.partial(_with_moments, theirs=theirs, forms=forms)
    outside = functools.partial(_with_moments, theirs=theirs, forms={}, left_out=parameters)

    def part(node: Any) -> Any:
        return jax.tree.map(inside, node, is_leaf=_is_known) if is_view(node) else outside(node)

    taken = jax.tree.map(part, own, is_leaf=lambda node: is_view(node) or _is_known(node))
    return place_state(optimizer, params, taken)


OURS = (MomentumState, optax.ScaleByAdamState, optax.ScaleByScheduleState)
OTHERS = (EigenbasisState, SubspaceState)  # whose moments are in other coordinates


def _is_known(node: Any) -> bool:
    return isinstance(node, (*OURS, *OTHERS))


def _moments(state: Any, names: tuple[str, ...]) -> _Theirs:
    """Moments by field and parameter, and the step.

    Raises:
      ValueError: if there are none.
    """
    found, counts = {}, []
    for path, x in arrays_in(state, ()).items():
        for field in FIELD.finditer(path):
            rest = path[field.end() + 1 :]
            if field[1] == "count" and not rest:
                counts.append(x)
            elif rest in names:
                found[field[1], rest] = x
    if not found or not counts:
        raise ValueError(
            "state: expected that of an Optax optimizer with mu, nu and count, such as "
            f"optax.adamw's, for these parameters; got {str(jax.tree.structure(state))[:80]}."
        )
    return _Theirs(found, jnp.max(jnp.stack([jnp.asarray(x) for x in counts])))


def _with_moments(
    node: Any,
    *,
    theirs: _Theirs,
    forms: dict[str, MatrixForm],
    left_out: frozenset[str] = frozenset(),
) -> Any:
    """A part of the state with the other optimizer's moments and step."""
    if not isinstance(node, OURS):
        return node
    known: Any = node
    if "mu" in node._fields and left_out & {*named_leaves(known.mu).present()}:
        return node  # of a base optimizer
    fields = {"count": jnp.asarray(theirs.count, known.count.dtype)}
    for field in {"mu", "nu"} & set(node._fields):
        leaves = named_leaves(getattr(node, field))
        values = {}
        for name, x in leaves.present().items():
            owner = forms[name].parameter if name in forms else name
            if (field, owner) not in theirs.moments:
                raise ValueError(
                    f"state has no {field} of {owner!r}: there it was treated in another way. "
                    "Treat it alike, by matrices= or weight_dimension_numbers=, or start anew."
                )
            values[name] = _cut(theirs.moments[field, owner], x, name, forms)
        fields[field] = leaves.rebuild(values)
    return node._replace(**fields)


def _cut(moment: Any, like: Any, name: str, forms: dict[str, MatrixForm]) -> jax.Array:
    moment = jnp.asarray(moment, like.dtype)
    shape = forms[name].shape if name in forms else like.shape
    if moment.shape != shape:
        raise ValueError(f"state has {moment.shape} for the moment of {name!r}, which is {shape}.")
    return forms[name].to_matrices(moment) if name in forms else moment
