r"""Steps that follow the norms of the weights, and steps that keep them.

| function | result | reference |
|---|---|---|
| `scale_by_weight_norm` | $c\,\|W\|\, D / \|D\|$ | Lars: arXiv:2502.07752, Eq. 34 |
| `keep_weight_norm` | $\|W\|\,(W + \Delta) / \|W + \Delta\| - W$ | Hyperball: arXiv:2606.16899 |

for a direction $D$ and an update $\Delta$ of weights $W$, with Frobenius norms per matrix. Both,
the first before the learning rate and the second after it, replace weight decay and move a matrix
by the same angle at each step: `weights="hyperball"` of a method.

*Numerics.* float32 at least. If the weights or the update are zero, the update stays as it is. So a
matrix that starts at zero keeps the norm of its first update. *Cost*: two passes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._validate import checked
from ..directions._normalize import per_matrix
from ..linalg._numerics import safe_norm, to_one


@checked
def scale_by_weight_norm(
    coefficient: jax.typing.ArrayLike = 1.0,
    *,
    eps: jax.typing.ArrayLike = 0.0,
    min_rms: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformation:
    """Gives each matrix of a direction `coefficient` times the norm of its weights.

    After `momentum` this is Lars. On plain gradients it is `optax.scale_by_trust_ratio`, with a
    norm for each matrix instead of one for each array.

    Args:
      coefficient: c.
      eps: added to the norm of the direction.
      min_rms: weights of a smaller root mean square count as this large; Adafactor has 1e-3. With
        0, weights of zero take the direction as it is, as in `optax.lars`, and grow from there by a
        factor of `1 + rate` per step: matrices that start at zero, such as LoRA's `B`, stand still.

    Returns:
      A transformation on batches of matrices `(..., m, n)` that needs parameters.

    Example:
      >>> import curvax, optax
      >>> lars = optax.chain(curvax.momentum(0.9), curvax.scale_by_weight_norm())
    """

    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        least = min_rms * math.sqrt(w.shape[-2] * w.shape[-1])
        return long_as(x, jnp.maximum(lengths(w), least), coefficient, eps)

    return per_matrix("scale_by_weight_norm", scaled, weights=True)


def keep_weight_norm() -> optax.GradientTransformation:
    """Changes updates so that each matrix of the weights keeps its Frobenius norm.

    Use it as the last part, after the learning rate.

    Returns:
      A transformation on batches of matrices `(..., m, n)` that needs parameters.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> weights = jnp.array([[3.0, 4.0]])
      >>> keep = curvax.keep_weight_norm()
      >>> update, _ = keep.update(jnp.array([[0.0, -4.0]]), keep.init(weights), weights)
      >>> (weights + update).tolist()
      [[5.0, 0.0]]
    """
    kept = lambda x, w: at_norm(x, w, lengths(w))  # noqa: E731
    return per_matrix("keep_weight_norm", kept, weights=True)


def long_as(
    x: jax.Array, norm: jax.Array, coefficient: Any, eps: jax.typing.ArrayLike = 0.0
) -> jax.Array:
    """Directions `(..., m, n)` at `coefficient` times these norms; as they are at norms of 0."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    shrink = to_one(largest)
    near_one = x * shrink
    length = lengths(near_one)
    follows = (norm > 0) & (length > 0)
    ratio = coefficient * norm / jnp.where(follows, length + eps * shrink, 1)  # Eq. 34
    return jnp.where(follows, near_one * ratio, x)


def at_norm(x: jax.Array, w: jax.Array, norm: jax.Array) -> jax.Array:
    """Updates of weights `w` that lead to these norms; as they are at norms of 0."""
    moved = w + x
    length = lengths(moved)
    # Two sums of the same squares may round differently: an update of 0 has to stay 0.
    keeps = (norm > 0) & (length > 0) & (x != 0).any((-2, -1), keepdims=True)
    return jnp.where(keeps, moved * (norm / jnp.where(keeps, length, 1)) - w, x)


def lengths(x: jax.Array) -> jax.Array:
    """The Frobenius norms `(..., 1, 1)`."""
    return safe_norm(x, axis=(-2, -1), keepdims=True)
