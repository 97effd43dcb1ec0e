r"""Normalization of rows or columns, without state.

| function | result | reference |
|---|---|---|
| `normalize_rows` | each row minus its mean, divided by its deviation | SWAN's GradNorm, Eq. 30 |
| `normalize_columns` | each column divided by its norm | section 3.3 |

The references are to Gong et al., arXiv:2502.07752.

*Numerics.* float32 at least; the standard deviation is that of the population (1/n). A zero column
gives 0, and so does a row that is constant up to rounding: its deviation is at most `n · eps` times
its largest entry. *Cost*: two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._validate import check_matrices


def normalize_rows() -> optax.GradientTransformation:
    """Gives each row of a matrix mean 0 and standard deviation 1.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> rows = curvax.normalize_rows()
      >>> rows.update(jnp.array([[1.0, 3.0], [5.0, 5.0]]), rows.init(jnp.eye(2)))[0].tolist()
      [[-1.0, 1.0], [0.0, 0.0]]
    """

    def normalized(x: jax.Array) -> jax.Array:
        n = x.shape[-1]
        largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        deviation = jnp.sqrt(jnp.mean(centered**2, axis=-1, keepdims=True))
        constant = deviation <= n * jnp.finfo(x.dtype).eps * largest  # not if it is NaN
        return jnp.where(constant, 0, centered / jnp.where(constant, 1, deviation))

    return _stateless("normalize_rows", normalized)


def normalize_columns() -> optax.GradientTransformation:
    """Gives each column of a matrix norm 1; zero columns stay zero.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> columns = curvax.normalize_columns()
      >>> columns.update(jnp.array([[3.0, 0.0], [4.0, 0.0]]), columns.init(jnp.eye(2)))[0].tolist()
      [[0.6, 0.0], [0.8, 0.0]]
    """

    def normalized(x: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(x, axis=-2, keepdims=True)
        zero = norm == 0  # not if it is NaN
        return jnp.where(zero, 0, x / jnp.where(zero, 1, norm))

    return _stateless("normalize_columns", normalized)


def _stateless(name: str, f: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    def init(params: Any) -> optax.EmptyState:
        check_matrices(params, name)
        return optax.EmptyState()

    def one(x: jax.Array) -> jax.Array:
        return f(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    def update(updates: Any, state: Any, params: Any = None):
        del params
        return jax.tree.map(one, updates), state

    return optax.GradientTransformation(init, update)
