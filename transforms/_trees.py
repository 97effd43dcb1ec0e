"""Tree maps that JAX does not have, and a wrapper that runs a chain in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._arrays import check_array, check_matrices, check_real, check_same_shape
from ._paths import is_hole, named_leaves


def map_unzip(outputs: int, f: Callable[..., tuple[Any, ...]], tree: Any, *rest: Any):
    """Maps `f` over leaves of `tree` and subtrees of `rest`; a tree of each of its `outputs`."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [treedef.flatten_up_to(r) for r in rest]
    results = [f(*row) for row in zip(leaves, *columns, strict=True)]
    return tuple(treedef.unflatten([result[i] for result in results]) for i in range(outputs))


def where_entries(which: jax.Array, new: Any, old: Any) -> Any:
    """`new`, but `old` for the batch entries for which `which (...)` is false."""
    wide = lambda x: which.reshape(*which.shape, *[1] * (x.ndim - which.ndim))  # noqa: E731
    return jax.tree.map(lambda a, b: jnp.where(wide(a), a, b), new, old)


def map_with_weights(part: str, f: Callable[..., Any], updates: Any, params: Any) -> Any:
    """`f(update, weight)` of every leaf, for a part that reads the weights."""
    if not jax.tree.leaves(updates):
        return updates
    if params is None:
        raise ValueError(f"params must be given to update: {part} reads the weights.")
    return jax.tree.map(f, updates, params)


def widened(tree: Any) -> Any:
    """The arrays of `tree`, in at least float32."""
    return jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, np.float32)), tree)


def in_full_range(tree: Any) -> Any:
    """The arrays of `tree`, those in float16 in float32."""
    # Adam's squares and epsilon would be 0 in float16, and a root infinite.
    is_half = lambda x: getattr(x, "dtype", None) == jnp.float16  # noqa: E731
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def as_arrays(params: Any, updates: Any) -> tuple[Any, Any]:
    """Parameters and gradients, as arrays of JAX where they are Python floats or NumPy's."""
    # Gradients get the wider of their dtypes and their parameters': a gradient in bfloat16 has 8
    # bits; an update of parameters in float32 needs 24.
    params = _without_static(params, updates)
    params, updates = jax.tree.map(_as_array, (params, updates))
    if params is None:
        for name, x in named_leaves(updates).present().items():
            check_array(name, x)
        return params, updates
    named, parameters = named_leaves(updates), named_leaves(params).present()
    for name, p in parameters.items():
        check_real(name, p)
    wide = named.present()
    for name, x in wide.items():
        check_real(name, x)
        if name in parameters:
            check_same_shape(name, x, parameters[name])
            wide[name] = x.astype(jnp.promote_types(x.dtype, jnp.result_type(parameters[name])))
    return params, named.rebuild(wide)


def _as_array(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        return jnp.asarray(x)  # in float32 without x64, as jit takes it
    return jnp.asarray(x, float) if isinstance(x, float) else x


def _without_static(params: Any, updates: Any) -> Any:
    """Parameters without what is not an array and has no gradient, as in a module of Equinox."""
    named = named_leaves(params)
    gone = {n for n, x in zip(*named_leaves(updates)[:2], strict=True) if is_hole(x)}

    def kept(name: str, x: Any) -> Any:
        is_array = jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)
        return x if is_array or is_hole(x) or name not in gone else None

    return named.treedef.unflatten(map(kept, named.names, named.leaves)) if gone else params


def in_float32(inner: optax.GradientTransformation, method: str) -> optax.GradientTransformation:
    """Runs `inner` in at least float32 and rounds to the gradients' dtypes only at the end."""
    # In a chain, updates would be too coarse for an exact property (a rank, a mean of 0).

    def init(params: Any) -> Any:
        check_matrices(params, method)
        return inner.init(widened(params))

    def update(updates: Any, state: Any, params: Any = None):
        wide = None if params is None else widened(params)
        directions, state = inner.update(widened(updates), state, wide)
        return jax.tree.map(lambda d, g: d.astype(g.dtype), directions, updates), state

    return optax.GradientTransformation(init, update)
