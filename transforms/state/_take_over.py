"""Moments of Optax's optimizers in the states of ours, so that a run goes on with another method.

| theirs | ours |
|---|---|
| `mu` and `nu` of Adam | those of Adam in `others` |
| `mu` of Adam or Muon, of a matrix | that of `momentum`, which counts as one of gradients |
| `count` | the counts of both, and of schedules |

Everything else starts anew: factors, bases and subspaces with the averages inside them, and base
optimizers, whose gradients are directions.
"""

from __future__ import annotations

import functools
import re
from typing import Any

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
from ._portable import joined_state, place_state
from ._traced import by_parameter, is_view, traced

FIELD = re.compile(r"(?:^|/)(mu|nu|count)(?=/|$)")


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
    names, forms = named_leaves(params).names, whole.forms
    theirs, step = _moments(state, names)
    matrices = {form.parameter for form in forms.values()}

    def moment(field: str, owner: str, like: Any, form: MatrixForm | None) -> jax.Array:
        if owner not in names:
            raise ValueError(
                "optimizer: a wrapper, such as optax.flatten, gives its inner optimizer another "
                f"tree than params, with {owner!r}. Pass the inner optimizer."
            )
        if (field, owner) not in theirs:
            raise ValueError(
                f"state has no {field} of {owner!r}: there it was treated in another way. "
                "Treat it alike, by matrices= or weight_dimension_numbers=, or start anew."
            )
        found = jnp.asarray(theirs[field, owner], like.dtype)
        shape = like.shape if form is None else form.shape
        if found.shape != shape:
            raise ValueError(
                f"state has {found.shape} for the moment of {owner!r}, which is {shape}."
            )
        return found if form is None else form.to_matrices(found)

    def renewed(node: Any, form: MatrixForm | None = None) -> Any:
        """A part of the state, of one parameter if it has a form, with their moments and step."""
        if not isinstance(node, OURS):
            return node
        known: Any = node
        trees = {name: named_leaves(getattr(node, name)) for name in declared(node)}
        fields = {n: "mu" if role == "first" else "nu" for n, role in declared(node).items()}
        means = (tree for n, tree in trees.items() if fields[n] == "mu")
        if form is None and any(matrices & {*tree.present()} for tree in means):
            return node  # of a base optimizer
        new = {"count": jnp.asarray(step, known.count.dtype)}
        for n, tree in trees.items():
            own = tree.present().items()
            owners = {path: form.parameter if form else path for path, _ in own}
            new[n] = tree.rebuild({p: moment(fields[n], owners[p], x, form) for p, x in own})
        return known._replace(**new)

    def part(node: Any) -> Any:
        if not is_view(node):
            return renewed(node)
        inner = {}
        for name, own in node.inner.items():
            of_matrix = functools.partial(renewed, form=forms[name])
            inner[name] = jax.tree.map(of_matrix, own, is_leaf=_is_known)
        return MatrixViewState(inner)

    own = by_parameter(joined_state(whole, optimizer.init(params)))
    taken = jax.tree.map(part, own, is_leaf=lambda node: is_view(node) or _is_known(node))
    return place_state(optimizer, params, taken)


OURS = (MomentumState, optax.ScaleByAdamState, optax.ScaleByScheduleState)
IN_A_BASIS = (EigenbasisState, SubspaceState)  # whose moments are in other coordinates


def _is_known(node: Any) -> bool:
    return isinstance(node, (*OURS, *IN_A_BASIS))


def _moments(state: Any, names: tuple[str, ...]) -> tuple[dict[tuple[str, str], Any], jax.Array]:
    """The moments in a state, by field and parameter, and its step."""
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
    return found, jnp.max(jnp.stack([jnp.asarray(x) for x in counts]))


def _is_step(x: Any) -> bool:
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer)
