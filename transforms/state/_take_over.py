"""Moments of Optax's optimizers in the states of ours, so that a run goes on with another method.

| theirs | ours |
|---|---|
| `mu` and `nu` of Adam | those of Adam in `others` |
| `mu` of Adam or Muon, of a matrix | that of `momentum`, cut into matrices |
| `count` | the counts of both, and of schedules |

A `momentum` counts as one of gradients, which it is in all methods. Everything else starts anew:
factors, bases and subspaces with the averages inside them, and base optimizers, whose gradients are
directions.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._paths import named_leaves
from ..directions._carry import declared
from ..directions._momentum import Accumulation, MomentumState
from ..kronecker._eigenbasis import EigenbasisState
from ..matrices._form import MatrixForm
from ..matrices._view import MatrixViewState
from ..subspace._subspace import SubspaceState
from ._entries import owned_entries
from ._portable import by_parameter, joined_state, place_state
from ._traced import is_view, traced

FIELD = re.compile(r"(?:^|/)(mu|nu|count)(?=/|$)")


class _Theirs(NamedTuple):
    moments: dict[tuple[str, str], Any]  # by field and parameter
    count: Any
    names: tuple[str, ...]  # of the parameters


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
      ValueError: if `state` has no moments, or lacks one of a parameter; if a wrapper gives
        `optimizer`, or gave the optimizer of `state`, another tree than `params`.

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
    owned_entries(whole, params)  # of these parameters, not of a wrapper's
    theirs, forms = _moments(state, named_leaves(params).names), whole.forms
    own = by_parameter(joined_state(whole, optimizer.init(params)))
    parameters = frozenset(form.parameter for form in forms.values())
    outside = functools.partial(_with_moments, theirs=theirs, left_out=parameters)

    def part(node: Any) -> Any:
        if not is_view(node):
            return outside(node)
        return MatrixViewState(
            {
                name: jax.tree.map(
                    functools.partial(_with_moments, theirs=theirs, form=forms[name]),
                    own,
                    is_leaf=_is_known,
                )
                for name, own in node.inner.items()
            }
        )

    taken = jax.tree.map(part, own, is_leaf=lambda node: is_view(node) or _is_known(node))
    return place_state(optimizer, params, taken)


OURS = (MomentumState, optax.ScaleByAdamState, optax.ScaleByScheduleState)
IN_A_BASIS = (EigenbasisState, SubspaceState)  # whose moments are in other coordinates


def _is_known(node: Any) -> bool:
    return isinstance(node, (*OURS, *IN_A_BASIS))


def _moments(state: Any, names: tuple[str, ...]) -> _Theirs:
    """Moments by field and parameter, and the step.

    Raises:
      ValueError: if there are none, or those of another tree.
    """
    found, counts, others = {}, [], []
    for path, x in named_leaves(state).present().items():
        fields = [(field[1], path[field.end() + 1 :]) for field in FIELD.finditer(path)]
        moments = [
            (field, name)
            for field, rest in fields
            for name in (rest, rest.removesuffix("/value"))  # of a box restored as a dict
            if field != "count" and name in names
        ]
        if moments:
            found[moments[0]] = x  # the names after it are those of a parameter
        elif _is_step(x) and fields and fields[-1] in (("count", ""), ("count", "value")):
            counts.append(x)
        elif any(field != "count" for field, _ in fields):
            others.append(path)
    if not found and others:
        raise ValueError(
            "state: a wrapper, such as optax.flatten, optax.lookahead or curvax.quantize_state, "
            f"keeps moments of another tree or form: there is an array at {others[0]!r}, and the "
            f"paths of params are {', '.join(names[:8])}{', ...' * (len(names) > 8)}. Pass the "
            "state of the inner optimizer, with its parameters."
        )
    if not found or not counts:
        raise ValueError(
            "state: expected that of an Optax optimizer with mu, nu and count, such as "
            f"optax.adamw's, for these parameters; got {str(jax.tree.structure(state))[:80]}."
        )
    return _Theirs(found, jnp.max(jnp.stack([jnp.asarray(x) for x in counts])), names)


def _is_step(x: Any) -> bool:
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _with_moments(
    node: Any,
    *,
    theirs: _Theirs,
    form: MatrixForm | None = None,
    left_out: frozenset[str] = frozenset(),
) -> Any:
    """A part of the state, of one parameter if it has a form, with their moments and step."""
    if not isinstance(node, OURS):
        return node
    known: Any = node
    moments = {own: {"first": "mu", "second": "nu"}[role] for own, role in declared(node).items()}
    known_to = (named_leaves(getattr(node, own)) for own, x in moments.items() if x == "mu")
    if any(left_out & {*named.present()} for named in known_to):
        return node  # of a base optimizer
    fields = {"count": jnp.asarray(theirs.count, known.count.dtype)}
    for own, field in moments.items():
        leaves = named_leaves(getattr(node, own))
        values = {}
        for name, x in leaves.present().items():
            owner = name if form is None else form.parameter
            if owner not in theirs.names:
                raise ValueError(
                    "optimizer: a wrapper, such as optax.flatten, gives its inner optimizer "
                    f"another tree than params, with {owner!r}. Pass the inner optimizer."
                )
            if (field, owner) not in theirs.moments:
                raise ValueError(
                    f"state has no {field} of {owner!r}: there it was treated in another way. "
                    "Treat it alike, by matrices= or weight_dimension_numbers=, or start anew."
                )
            values[name] = _cut(theirs.moments[field, owner], x, owner, form)
        fields[own] = leaves.rebuild(values)
    return node._replace(**fields)


def _cut(moment: Any, like: Any, name: str, form: MatrixForm | None) -> jax.Array:
    moment = jnp.asarray(moment, like.dtype)
    shape = like.shape if form is None else form.shape
    if moment.shape != shape:
        raise ValueError(f"state has {moment.shape} for the moment of {name!r}, which is {shape}.")
    return moment if form is None else form.to_matrices(moment)
