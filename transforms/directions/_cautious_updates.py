r"""Cautious updates (Liang et al., arXiv:2411.16085, Algorithm 1).

$$D \leftarrow \alpha\, \phi \odot D, \qquad \phi = \mathbb 1[D \odot G > 0], \qquad
\alpha = d / (\mathrm{nnz}(\phi) + 1)$$

for a direction $D$, before the learning rate and the sign, and the gradient $G$ of the step, of
`d` entries. *Numerics.* Signs are compared, because products may underflow. What is not finite
stays so. *Cost*: two passes. *State*: that of the direction.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._validate import as_transformation, checked


@checked
def cautious_updates(
    direction: optax.GradientTransformation, *, rescale: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Sets the entries of a direction to zero that do not have the sign of their gradient.

    Args:
      direction: a direction, without learning rate and sign; weight decay goes behind.
      rescale: whether α multiplies the others: each matrix of `(..., m, n)`, or vector, by its own.

    Returns:
      A transformation of leaves of any shape.

    Raises:
      ValueError: if an argument is not allowed.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> cautious = curvax.cautious_updates(optax.trace(0.5), rescale=False)
      >>> state = cautious.init(jnp.zeros(3))
      >>> for gradient in (jnp.array([4.0, 4.0, 0.0]), jnp.array([1.0, -1.0, 1.0])):
      ...     update, state = cautious.update(gradient, state)
      >>> update.tolist()
      [3.0, 0.0, 1.0]
      >>> muon = curvax.assemble(curvax.cautious_updates(curvax.scale_by_muon()), 0.02)
    """
    direction = as_transformation("direction", direction)

    def masked(d: jax.Array, g: jax.Array) -> jax.Array:
        against = jnp.sign(d) * jnp.sign(g).astype(d.dtype) <= 0  # not if one is NaN
        kept = jnp.where(against, 0, d)
        if not rescale:
            return kept
        axes = tuple(range(max(0, d.ndim - 2), d.ndim))
        entries = float(np.prod([d.shape[axis] for axis in axes]))
        number = jnp.sum(~against, axis=axes, keepdims=True)
        return (kept * (entries / (number + 1))).astype(d.dtype)  # Algorithm 1

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        moved, state = direction.update(updates, state, params, **extra_args)
        return jax.tree.map(masked, moved, updates), state

    return optax.GradientTransformationExtraArgs(direction.init, update)
