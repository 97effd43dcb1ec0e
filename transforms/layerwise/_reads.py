"""When a gradient has read the weights, so that they may be written.

XLA may schedule the write of a weight before a product that reads its old value, and then copies
the weights of all layers to keep it. `reading` says after which intermediate result each weight has
been read; a write that waits for that result needs no copy, and need not wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun


def reading(f: Callable[..., Any], layer: Any, *args: Any) -> tuple[Any, Any]:
    """`f(layer, *args)`, and a tree like `layer`: what exists once `f` has read each leaf.

    That is the list of results of the last equation with the leaf and another array; a transpose
    or another dtype of the leaf counts as the leaf itself.
    """
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(layer, *args)
    jaxpr = closed.jaxpr
    leaves, treedef = jax.tree.flatten(layer)
    origin = {v: {k} for k, v in enumerate(jaxpr.invars[: len(leaves)])}
    last: list[list[Any]] = [[] for _ in leaves]
    for eqn in jaxpr.eqns:
        given = [v for v in eqn.invars if isinstance(v, Var)]
        own = set().union(*(origin.get(v, ()) for v in given))
        if own and all(v in origin for v in given):
            origin |= dict.fromkeys(eqn.outvars, own)
        else:
            for k in own:
                last[k] = [*eqn.outvars]
    results = len(jaxpr.outvars)
    outvars = [*jaxpr.outvars, *(v for own in last for v in own)]
    info = jaxpr.debug_info._replace(result_paths=None)
    longer = ClosedJaxpr(jaxpr.replace(outvars=outvars, debug_info=info), closed.consts)
    found = jaxpr_as_fun(longer)(*jax.tree.leaves((layer, *args)))
    rest = iter(found[results:])
    after = treedef.unflatten([[next(rest) for _ in own] for own in last])
    return jax.tree.structure(shapes).unflatten(found[:results]), after
