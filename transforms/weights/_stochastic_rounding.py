r"""Stochastic rounding of parameters in bfloat16.

bfloat16 has 8 significant bits, so `params + updates`, rounded to the nearest, loses every update
below $2^{-9}$ of its parameter, at every step. Stochastic rounding (`_rounding.py`) replaces
$p + u$ by one of its two neighbors, so that the expectation is $p + u$. The sum is in float32: an
update below $2^{-25}$ of its parameter is lost, as with parameters in float32. *State.* A key, a
counter, and 4 bytes per row.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._paths import is_hole, is_placeholder, named_leaves
from .._stacks import IMPLEMENTATION, key_for
from .._validate import as_transformation, checked
from ._inner import init_inner, is_narrow, map_narrow, update_inner, wide
from ._rounding import random_bits, stochastic, update_to


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    count: jax.Array  # steps, int32 ()
    key: jax.Array  # key data, uint32 (2,)
    rows: Any  # 0, 1, … for the first axis, uint32: layers that are cut out keep their numbers
    inner: Any  # state of the inner optimizer


@checked
def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds parameters in bfloat16 up or down at random, so small updates are not lost.

    The random bits of an entry depend on the seed, the step, the path of the parameter and the
    place in it, but not on devices or meshes: a run resumed from a checkpoint repeats itself.

    Args:
      inner: the whole optimizer. It gets gradients and parameters in float32, and its moments are
        in float32 unless it has an argument for their dtype. Parameters in float32 are updated as
        without this wrapper, bit for bit.
      seed: of the random bits.

    Returns:
      An optimizer whose updates are in float32 for parameters in bfloat16. Add them with
      `optax.apply_updates`, as `nnx.Optimizer` does, and do not change them before.

    Raises:
      ValueError: in `init`, if a parameter is in float16; in `update`, without `params`.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
      >>> optimizer = curvax.stochastic_rounding(optax.sgd(1.0))
      >>> state, gradients = optimizer.init(params), {"kernel": jnp.full((64, 64), 1e-4)}
      >>> for _ in range(30):
      ...     updates, state = optimizer.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["kernel"].dtype, round(float(jnp.mean(params["kernel"].astype(float))), 3)
      (dtype(bfloat16), 0.997)
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> StochasticRoundingState:
        key = jax.random.key_data(jax.random.key(seed, impl=IMPLEMENTATION))
        numbers = lambda p: jnp.arange(len(p), dtype=jnp.uint32) if p.ndim else optax.MaskedNode()  # noqa: E731
        rows = jnp.zeros(0, jnp.uint32) if is_placeholder(params) else map_narrow(numbers, params)
        count = jnp.zeros((), jnp.int32)
        return StochasticRoundingState(count, key, rows, init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, inner_state = update_inner(inner, updates, state, params, extra_args)

        def change(p: jax.Array, u: jax.Array, key: jax.Array, rows: Any) -> jax.Array:
            if not is_narrow(p):
                return u
            total = wide(p) + wide(u)
            bits = random_bits(key, None if is_hole(rows) else rows, p.shape)
            return update_to(stochastic(total, bits), p, u)

        keys = _leaf_keys(params, key_for(state.key, state.count))
        changes = jax.tree.map(change, params, updates, keys, state.rows)
        count = jnp.asarray(optax.safe_increment(state.count))
        return changes, StochasticRoundingState(count, state.key, state.rows, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _leaf_keys(params: Any, key: jax.Array) -> Any:
    """A tree with a key for each parameter, uint32 `(2,)`, which depends on its path."""
    named = named_leaves(params)
    names = list(named.present())
    hashes = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
    # One call for all parameters: a program for each takes long to compile.
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, hashes))
    return named.rebuild({name: keys[i] for i, name in enumerate(names)})
