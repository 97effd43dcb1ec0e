r"""Weight decay that is optional, and cautious weight decay (Chen et al., arXiv:2510.12402).

$$D \leftarrow D + \lambda\, \mathbb 1[D \odot W \ge 0] \odot W$$

for a direction $D$, before the learning rate and the sign. An entry decays if the step makes it
smaller anyway, so that decay never works against the direction. *Cost*: one pass, no state.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._paths import named_leaves
from .._trees import map_with_weights
from .._validate import checked


@checked
def add_cautious_decay(
    weight_decay: jax.typing.ArrayLike = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    """Adds decay to the entries whose direction has the sign of their weight.

    In place of `optax.add_decayed_weights`, before the learning rate, for any leaves.

    Args:
      weight_decay: λ.
      mask: which parameters decay, as in `optax.adamw`.

    Returns:
      A transformation that needs parameters.

    Raises:
      ValueError: if `weight_decay` is negative.

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> decay = curvax.add_cautious_decay(0.5)
      >>> weights, direction = jnp.array([2.0, -2.0]), jnp.array([1.0, 1.0])
      >>> decay.update(direction, decay.init(weights), weights)[0].tolist()
      [2.0, 1.0]
    """

    def decayed(d: jax.Array, w: jax.Array) -> jax.Array:
        return d + jnp.where(shrinking(d, w), weight_decay * w, 0).astype(d.dtype)  # Algorithm 1

    def update(updates: Any, state: Any, params: Any = None):
        return map_with_weights("add_cautious_decay", decayed, updates, params), state

    decay = optax.GradientTransformation(optax.init_empty_state, update)
    return decay if mask is None else optax.masked(decay, mask_of(mask))


def shrinking(d: jax.Array, w: jax.Array) -> jax.Array:
    """Which weights `w` other than 0 a step against the direction `d` makes smaller, or keeps."""
    # Signs, because a product may underflow to 0.
    return (jnp.sign(d) * jnp.sign(w).astype(d.dtype) >= 0) & (w != 0)


def mask_of(mask: Any) -> Any:
    """A mask for Optax; a tree of booleans by path, whatever boxes hold it or the parameters."""
    # `nnx.state` has boxes, and the parameters that an `nnx.Optimizer` passes on have none.
    marks = jax.tree.leaves(mask)
    if len(marks) == 1 and marks[0] is mask and callable(mask):
        return lambda params: _mask_by_path(mask(params), params)
    _check_marks(marks)
    return (lambda params: _mask_by_path(mask, params)) if marks else mask


def _check_marks(marks: list[Any]) -> None:
    for mark in marks:
        if isinstance(mark, str):
            raise ValueError(
                "weight_decay_mask must be a tree of booleans like the parameters, or a function "
                f"of the parameters that makes one; got {mark!r}."
            )


def _mask_by_path(mask: Any, params: Any) -> Any:
    marks = jax.tree.leaves(mask)
    _check_marks(marks)
    if not marks or not all(isinstance(mark, (bool, np.bool_)) for mark in marks):
        return mask
    marked, named = named_leaves(mask).present(), named_leaves(params)
    within = lambda a, b: not b or f"{a}/".startswith(f"{b}/")  # noqa: E731
    # A part that is left out may be one hole, above its entries.
    names = named.names
    surplus = [p for p in marked if not any(within(p, n) or within(n, p) for n in names)]
    lacking = [name for name in named.present() if not any(within(name, p) for p in marked)]
    if lacking or surplus:
        wrong = [f"has no entry for {name!r}" for name in lacking[:1]]
        wrong += [f"has an entry for {name!r}, which is not a parameter" for name in surplus[:1]]
        raise ValueError(
            f"weight_decay_mask must have the structure of the parameters; it "
            f"{' and '.join(wrong)}. Its entries are {', '.join(marked)}; the parameters are "
            f"{', '.join(names)}."
        )
    if named.present().keys() <= marked.keys():
        return named.rebuild(marked)
    return mask  # whose booleans may stand for whole parts


def optional_decay(
    weight_decay: Any, decay: optax.GradientTransformation, *, counts: bool = False
) -> optax.GradientTransformation:
    """`decay`, or a form with its state that changes and reads nothing if `weight_decay` is 0."""
    # A checkpoint survives switching decay on or off. `counts`: the state has a counter.
    # An injected number is an array, which may change later.
    if not (isinstance(weight_decay, (int, float)) and weight_decay == 0):
        return decay

    def counted(updates: Any, state: Any, params: Any = None):
        return updates, decay.update(updates, state, updates)[1]

    return optax.GradientTransformation(decay.init, counted if counts else optax.identity().update)
