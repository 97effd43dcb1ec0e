r"""Parameters in bfloat16 with more bits in the state: Kahan summation and master weights.

For a parameter $p$ and its update $u$, with $\mathrm{rn}$ for rounding to the nearest bfloat16:

- Kahan summation: a compensation $c$ in bfloat16,
  $q = \mathrm{rn}(p + (u + c))$, $c \leftarrow \mathrm{rn}((p - q) + (u + c))$;
- master weights: $w \leftarrow w + u$ in float32, $q = \mathrm{rn}(w)$.

*Numerics.* Parameter and compensation together have at least 16 bits, and a master has 24. A sum
that is not finite clears the compensation. If a step makes a master more than $2^{16}$ times
smaller, the parameter may miss it by $2^{-24}$ of its old value; it then replaces the master.
*State.* 2 and 4 bytes per parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._trees import map_unzip
from .._validate import as_transformation
from ._inner import check_given, init_inner, is_narrow, map_narrow, update_inner, wide
from ._rounding import nearest, update_to


class KahanState(NamedTuple):
    """State of `kahan_summation`."""

    compensation: Any  # c, bfloat16, in the parameters' shapes
    inner: Any  # state of the inner optimizer


class MasterState(NamedTuple):
    """State of `master_weights`."""

    masters: Any  # w, float32, in the parameters' shapes
    inner: Any  # state of the inner optimizer


def kahan_summation(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Stores the rounding errors of parameters in bfloat16, and adds them at the next step.

    Parameter and compensation together have about 16 significant bits. Nothing is random.

    Args:
      inner: the whole optimizer, see `stochastic_rounding`.

    Returns:
      An optimizer, see `stochastic_rounding`.

    Example:
      >>> import curvax, optax
      >>> optimizer = curvax.kahan_summation(optax.adamw(1e-5))

    References:
      Zamirai et al., `Revisiting BFloat16 training <https://arxiv.org/abs/2010.06192>`_, 2020.
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> KahanState:
        return KahanState(map_narrow(jnp.zeros_like, params), init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, inner_state = update_inner(inner, updates, state, params, extra_args)

        def change(p: jax.Array, u: jax.Array, c: Any) -> tuple[jax.Array, Any]:
            if not is_narrow(p):
                return u, c
            wanted = wide(u) + wide(c)
            q = nearest(wide(p) + wanted)
            lost = jnp.where(jnp.isfinite(q), (wide(p) - q) + wanted, 0)
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

    Example:
      >>> import curvax
      >>> optimizer = curvax.master_weights(curvax.racs(1e-3))

    References:
      Micikevicius et al., `Mixed precision training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> MasterState:
        return MasterState(map_narrow(wide, params), init_inner(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        def current(p: Any, w: Any) -> Any:
            return jnp.where(nearest(w) == wide(p), w, wide(p)) if is_narrow(p) else p

        check_given(state, params)
        weights = jax.tree.map(current, params, state.masters)
        updates, inner_state = update_inner(inner, updates, state, params, extra_args, weights)

        def change(p: jax.Array, u: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            if not is_narrow(p):
                return u, optax.MaskedNode()
            w = w + wide(u)
            return update_to(nearest(w), p, u), w

        changes, masters = map_unzip(2, change, params, updates, weights)
        return changes, MasterState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
