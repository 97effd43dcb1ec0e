r"""Clipping by the norm that the gradients of the whole tree had in the step before.

$$G_t \leftarrow \min\left(1,\ \frac{c}{n_{t-1}}\right) G_t, \qquad n_t = \|G_t\|$$

with the Frobenius norm over all leaves before clipping. The first step and a step after zero
gradients are not clipped. Unlike clipping by the norm of the same step, this needs no second pass
over the gradients, nor all of them in memory together, and `layerwise` accepts it.

*Numerics.* Squares are summed in at least float32. An entry does not count if it or its square is
not finite. *Cost*: one pass. *State*: two numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._counts import next_step
from .._trees import widened
from .._validate import checked
from ..linalg._numerics import safe_root


class ClipByLastNormState(NamedTuple):
    squares: jax.Array  # n², of the last step's gradients, float32 scalar
    count: jax.Array  # t, int32 scalar

    def over_layers(self, new: Any) -> ClipByLastNormState:
        """The sum over layers `(layers,)`; those that kept this state have equal shares in it."""
        # In each step of `optax.MultiSteps` but the last, all layers keep it.
        kept = new.count == self.count
        squares = jnp.where(kept, self.squares / new.squares.size, new.squares)
        total = jnp.minimum(jnp.sum(squares), jnp.finfo(jnp.float32).max)
        return ClipByLastNormState(jnp.where(kept.all(), self.squares, total), jnp.max(new.count))


@checked
def clip_by_last_norm(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Scales gradients down if those of the step before were longer than `max_norm`.

    It takes the place of `optax.clip_by_global_norm` in layer-wise steps (`curvax.layerwise`), and
    gives the same updates in ordinary ones. A gradient that is suddenly long passes in its own
    step; `curvax.limit_norm_growth` limits the direction of each matrix in the same step.

    Args:
      max_norm: the length above which a gradient shortens the next one, positive.

    Returns:
      A transformation of leaves of any shape.

    Raises:
      ValueError: if `max_norm` is not positive.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> clip = curvax.clip_by_last_norm(1.0)
      >>> first, state = clip.update(jnp.array([4.0]), clip.init(jnp.zeros(1)))
      >>> second, state = clip.update(jnp.array([2.0]), state)
      >>> float(first[0]), float(second[0])
      (4.0, 0.5)
    """

    def init(params: Any) -> ClipByLastNormState:
        return ClipByLastNormState(jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None):
        norm = safe_root(state.squares)
        long = ~(norm <= max_norm)  # also if it is NaN
        factor = jnp.where(long, max_norm / jnp.where(long, norm, 1), 1)
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)
        squares = [jnp.square(g) for g in jax.tree.leaves(widened(updates))]
        each = [jnp.sum(jnp.where(jnp.isfinite(x), x, 0)).astype(jnp.float32) for x in squares]
        largest = jnp.finfo(jnp.float32).max
        total = jnp.minimum(jnp.sum(jnp.stack(each)), largest) if each else state.squares
        return clipped, ClipByLastNormState(total, next_step(state.count))

    return optax.GradientTransformation(init, update)
