r"""Normalization of rows, columns or matrices, without state.

`standardize_rows` is SWAN's GradNorm (Gong et al., arXiv:2502.07752, Eq. 30; others: section 3.3).

*Numerics.* float32 at least; the standard deviation is that of the population (1/n). Zero rows,
columns and matrices stay zero. `standardize_rows` also gives 0 for a row that is constant up to
rounding: its deviation is at most `n · eps` times its largest entry. *Cost*: two passes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._arrays import check_matrices
from .._trees import map_with_weights
from .._validate import checked
from ..linalg._numerics import divided, safe_norm, safe_root, to_one
from ..linalg._schatten import SPECTRAL, schatten_norms


def standardize_rows() -> optax.GradientTransformation:
    """Gives each row of a matrix mean 0 and standard deviation 1, that is, norm `√n`.

    Rows of one entry become their signs, without a mean to subtract: a kernel with one output, such
    as that of a value head, would never move.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> rows = curvax.standardize_rows()
      >>> rows.update(jnp.array([[1.0, 3.0], [5.0, 5.0]]), rows.init(jnp.eye(2)))[0].tolist()
      [[-1.0, 1.0], [0.0, 0.0]]
    """

    def normalized(x: jax.Array) -> jax.Array:
        n = x.shape[-1]
        largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        centered = x if n == 1 else x - jnp.mean(x, axis=-1, keepdims=True)
        deviation = safe_root(jnp.mean(centered**2, axis=-1, keepdims=True))
        constant = deviation <= n * jnp.finfo(x.dtype).eps * largest  # not if it is NaN
        return jnp.where(constant, 0, centered / jnp.where(constant, 1, deviation))  # Eq. 30

    return per_matrix("standardize_rows", normalized)


def normalize_rows() -> optax.GradientTransformation:
    """Gives each row of a matrix norm 1; zero rows stay zero.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> rows = curvax.normalize_rows()
      >>> rows.update(jnp.array([[3.0, 4.0], [0.0, 0.0]]), rows.init(jnp.eye(2)))[0].tolist()
      [[0.6, 0.8], [0.0, 0.0]]
    """
    return per_matrix("normalize_rows", lambda x: _of_norm_1(x, -1))


def normalize_columns() -> optax.GradientTransformation:
    """Gives each column of a matrix norm 1; zero columns stay zero.

    Columns are the outputs of a kernel `(in, out)`, which are rows in torch: before a polar factor
    this is MuonEq-R (arXiv:2603.28254).

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> columns = curvax.normalize_columns()
      >>> columns.update(jnp.array([[3.0, 0.0], [4.0, 0.0]]), columns.init(jnp.eye(2)))[0].tolist()
      [[0.6, 0.0], [0.8, 0.0]]
    """
    return per_matrix("normalize_columns", lambda x: _of_norm_1(x, -2))


def _of_norm_1(x: jax.Array, axis: int) -> jax.Array:
    return divided(x, safe_norm(x, axis=axis, keepdims=True))


@checked
def normalize_matrices(
    length: jax.typing.ArrayLike = 0.2, *, norm: str = "rms"
) -> optax.GradientTransformation:
    """Gives each matrix this length; zero matrices stay zero.

    Behind any direction, a root mean square of 0.2 makes updates as long as AdamW's, so that its
    learning rate and weight decay carry over (Liu et al., arXiv:2502.16982); `scale_by_shape(0.2)`
    does so for orthogonal directions of full rank without reading them. A spectral norm of one size
    for all matrices, times a factor of their shapes, keeps learning rates over widths
    (arXiv:2310.17813, arXiv:2512.05620).

    Args:
      length: the root mean square, or the spectral norm.
      norm: "rms", or "spectral": by products (`linalg/_schatten.py`), so that the spectral norm is
        below `length`, by less than 0.1 %.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> matrices = curvax.normalize_matrices(0.5)
      >>> x = jnp.array([[3.0, 0.0], [4.0, 0.0]])
      >>> matrices.update(x, matrices.init(x))[0].tolist()
      [[0.6, 0.0], [0.8, 0.0]]
    """

    def normalized(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
        near_one = x * to_one(largest)
        if norm == "rms":
            size = safe_root(jnp.mean(near_one**2, axis=(-2, -1), keepdims=True))
        else:
            size = schatten_norms(near_one, SPECTRAL)
        zero = size == 0  # not if it is NaN
        return jnp.where(zero, 0, near_one * (length / jnp.where(zero, 1, size)))

    return per_matrix("normalize_matrices", normalized)


def per_matrix(name: str, f: Callable[..., jax.Array], *, weights: bool = False) -> Any:
    """A stateless transformation: `f` of each array of matrices (and of its weights), widened."""

    def init(params: Any) -> optax.EmptyState:
        check_matrices(params, name)
        return optax.EmptyState()

    def one(x: jax.Array, *w: jax.Array) -> jax.Array:
        dtype = np.promote_types(jnp.result_type(*(y.dtype for y in (x, *w))), np.float32)
        return f(*(y.astype(dtype) for y in (x, *w))).astype(x.dtype)

    def update(updates: Any, state: Any, params: Any = None):
        if weights:
            return map_with_weights(name, one, updates, params), state
        return jax.tree.map(one, updates), state

    return optax.GradientTransformation(init, update)
