"""A state as a dict of arrays, for training loops that expect AdamW's, which has no holes."""

from typing import Any

import jax
import optax

from .._paths import named_leaves
from .._validate import check_given, check_transformation
from ._portable import in_structure


def flat_state(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is a dict from paths to arrays, without any other container.

    Use it if other code asks each entry of a state for its shape or dtype, or maps over moments and
    parameters together, and fails with "'MaskedNode' object has no attribute 'dtype'" (or 'shape'),
    or with an error about a pytree structure: moments have holes for the other part.

    The tools (`portable_state`, `report`, `state_of`, …) take such a state for that of `optimizer`,
    and `update` takes that of `optimizer`, for example from `place_state`.

    Args:
      optimizer: any Optax transformation.

    Returns:
      A transformation with the same updates, which costs nothing in a compiled step.
      `optax.tree.map_params` does not know whose its arrays are; map `optimizer`'s.

    Raises:
      ValueError: in `update`, if the state is not that of `optimizer`, or if `params` is `None`.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> inner = curvax.muon(0.02)
      >>> optimizer = curvax.flat_state(inner)
      >>> state = optimizer.init(params)
      >>> updates, state = jax.jit(optimizer.update)(params, state, params)
      >>> all(isinstance(x, jax.Array) for x in state.values())
      True
      >>> portable = curvax.portable_state(inner, params, state)
    """
    check_transformation("optimizer", optimizer)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> dict[str, Any]:
        return named_leaves(optimizer.init(params)).present()

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_given(state, params)
        like = jax.eval_shape(optimizer.init, params)
        whole = in_structure("state", like, state, dtypes=False)
        updates, whole = optimizer.update(updates, whole, params, **extra_args)
        return updates, named_leaves(whole).present()

    return optax.GradientTransformationExtraArgs(init, update)
