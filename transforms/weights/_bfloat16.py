r"""Parameters in bfloat16, with updates that are not lost: by random bits, or by more bits.

bfloat16 has 8 significant bits, so `params + updates`, rounded to the nearest, loses every update
below $2^{-9}$ of its parameter, at every step. For a parameter $p$ and its update $u$, with
$\mathrm{rn}$ for rounding to the nearest bfloat16:

- stochastic rounding (`_rounding.py`): one of the two neighbors of $p + u$, of expectation $p + u$;
- Kahan summation: a compensation $c$ in bfloat16,
  $q = \mathrm{rn}(p + (u + c))$, $c \leftarrow \mathrm{rn}((p - q) + (u + c))$;
- master weights: $w \leftarrow w + u$ in float32, $q = \mathrm{rn}(w)$.

*Numerics.* Sums are in float32. Parameter and compensation together have at least 16 bits, and a
master has 24. A sum that is not finite clears the compensation. If a step makes a master more than
$2^{16}$ times smaller, the parameter may miss it by $2^{-24}$ of its old value; it then replaces
the master. *State.* 4 bytes per row of a parameter, 2 per parameter, and 4.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._counts import next_step
from .._paths import is_hole, is_placeholder, named_leaves
from .._stacks import IMPLEMENTATION, key_for
from .._trees import map_unzip
from .._validate import as_transformation, check_given, checked
from ._rounding import nearest, random_bits, stochastic, update_to


class StochasticRoundingState(NamedTuple):
    count: jax.Array  # steps, int32 ()
    key: jax.Array  # key data, uint32 (2,)
    rows: Any  # 0, 1, … for the first axis, uint32: layers that are cut out keep their numbers
    inner: Any  # state of the inner optimizer


class KahanState(NamedTuple):
    compensation: Any  # c, bfloat16, in the parameters' shapes
    inner: Any  # state of the inner optimizer


class MasterState(NamedTuple):
    masters: Any  # w, float32, in the parameters' shapes
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
        rows = jnp.zeros(0, jnp.uint32) if is_placeholder(params) else _map_narrow(numbers, params)
        count = jnp.zeros((), jnp.int32)
        return StochasticRoundingState(count, key, rows, _init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, inner_state = _update_inner(inner, updates, state, params, extra_args)

        def change(p: jax.Array, u: jax.Array, key: jax.Array, rows: Any) -> jax.Array:
            if not _is_narrow(p):
                return u
            bits = random_bits(key, None if is_hole(rows) else rows, p.shape)
            return update_to(stochastic(_wide(p) + _wide(u), bits), p, u)

        keys = _leaf_keys(params, key_for(state.key, state.count))
        changes = jax.tree.map(change, params, updates, keys, state.rows)
        count = next_step(state.count)  # a count that stays would draw the same bits again
        return changes, StochasticRoundingState(count, state.key, state.rows, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def kahan_summation(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Stores the rounding errors of parameters in bfloat16, and adds them at the next step.

    Parameter and compensation together have about 16 significant bits. Nothing is random.

    Args:
      inner: the whole optimizer, see `stochastic_rounding`.

    Returns:
      An optimizer, see `stochastic_rounding`.

    Raises:
      ValueError: see `stochastic_rounding`.

    Example:
      >>> import curvax, optax
      >>> optimizer = curvax.kahan_summation(optax.adamw(1e-5))

    References:
      Zamirai et al., `Revisiting BFloat16 training <https://arxiv.org/abs/2010.06192>`_, 2020.
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> KahanState:
        return KahanState(_map_narrow(jnp.zeros_like, params), _init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, inner_state = _update_inner(inner, updates, state, params, extra_args)

        def change(p: jax.Array, u: jax.Array, c: Any) -> tuple[jax.Array, Any]:
            if not _is_narrow(p):
                return u, c
            wanted = _wide(u) + _wide(c)
            q = nearest(_wide(p) + wanted)
            lost = jnp.where(jnp.isfinite(q), (_wide(p) - q) + wanted, 0)
            return update_to(q, p, wanted), nearest(lost).astype(c.dtype)

        changes, compensation = map_unzip(2, change, params, updates, state.compensation)
        return changes, KahanState(compensation, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps float32 masters of parameters in bfloat16 in the state; parameters are these, rounded.

    A parameter that was changed elsewhere, and is no longer its rounded master, replaces it.

    Args:
      inner: the whole optimizer, see `stochastic_rounding`; its weight decay sees the masters.

    Returns:
      An optimizer, see `stochastic_rounding`.

    Raises:
      ValueError: see `stochastic_rounding`.

    Example:
      >>> import curvax
      >>> optimizer = curvax.master_weights(curvax.racs(1e-3))

    References:
      Micikevicius et al., `Mixed precision training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> MasterState:
        return MasterState(_map_narrow(_wide, params), _init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        def current(p: Any, w: Any) -> Any:
            return jnp.where(nearest(w) == _wide(p), w, _wide(p)) if _is_narrow(p) else p

        check_given(state, params)
        weights = jax.tree.map(current, params, state.masters)
        updates, inner_state = _update_inner(inner, updates, state, params, extra_args, weights)

        def change(p: jax.Array, u: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            if not _is_narrow(p):
                return u, optax.MaskedNode()
            w = w + _wide(u)
            return update_to(nearest(w), p, u), w

        changes, masters = map_unzip(2, change, params, updates, weights)
        return changes, MasterState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_inner(inner: optax.GradientTransformation, params: Any) -> Any:
    """The state of the inner optimizer; its moments are in float32, like the parameters it sees."""
    for name, p in named_leaves(params).present().items():
        if jnp.result_type(p) == jnp.float16:
            raise ValueError(
                f"the parameter {name!r} has dtype float16, whose small numbers have fewer bits; "
                "wrappers for low precision take bfloat16 and leave float32 as it is."
            )
    return inner.init(_widen_narrow(params))


def _update_inner(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: Any, wide_params: Any = None
) -> Any:
    """The inner update, with `state.inner`; what belongs to bfloat16 goes in as float32."""
    check_given(state, params)
    wide_params = _widen_narrow(params) if wide_params is None else wide_params
    updates = jax.tree.map(lambda p, g: _wide(g) if _is_narrow(p) else g, params, updates)
    return inner.update(updates, state.inner, wide_params, **extra_args)


def _is_narrow(p: Any) -> bool:
    return jnp.result_type(p) == jnp.bfloat16


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _widen_narrow(params: Any) -> Any:
    return jax.tree.map(lambda p: _wide(p) if _is_narrow(p) else p, params)


def _map_narrow(f: Any, params: Any) -> Any:
    """A tree with `f` of each parameter in bfloat16, and a hole for each other parameter."""
    return jax.tree.map(lambda p: f(p) if _is_narrow(p) else optax.MaskedNode(), params)


def _leaf_keys(params: Any, key: jax.Array) -> Any:
    """A tree with a key for each parameter, uint32 `(2,)`, which depends on its path."""
    named = named_leaves(params)
    names = list(named.present())
    hashes = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
    # One call for all parameters: a program for each takes long to compile.
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, hashes))
    return named.rebuild({name: keys[i] for i, name in enumerate(names)})
