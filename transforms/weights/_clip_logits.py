r"""QK-clip: shrinks the kernels of attention heads whose logits are too large.

$$W \leftarrow \gamma^{\alpha}\, (W + \Delta), \qquad \gamma = \min(1,\ \tau / S)$$

for the update $\Delta$ of a kernel and the largest logit $S$ of each head in this step's batch
(Kimi team, arXiv:2507.20534). With $\alpha = 1/2$ for query and key, the logits of a head shrink by
$\gamma$. Heads of latent attention share the rotary components of their keys, so these stay as they
are, and those of the queries take the whole $\gamma$: `power={"*query_rope*": 1.0, "*": 0.5}`.

*Numerics.* float32 at least. A head whose statistic is zero or not finite is not clipped.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._paths import first_of, matches, named_leaves
from .._validate import Number, checked, shown


@checked
def clip_logits(
    threshold: jax.typing.ArrayLike = 100.0,
    *,
    power: jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike] = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Shrinks given kernels where a statistic of the model exceeds a threshold.

    Put it last, after a full optimizer. `update` takes the statistics as `max_logits`: a mapping
    from the paths of parameters, as `summarize` prints them, to arrays that broadcast against the
    parameters, such as `s[:, None]` for kernels `(D, H, K)` and the logits `s (H,)` of heads.
    Without this argument it clips nothing.

    Args:
      threshold: τ.
      power: α; or a mapping from path patterns to numbers, in which the first match wins.

    Returns:
      A transformation that needs parameters.

    Raises:
      ValueError: if an argument is outside its range, or a path has no parameter.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> optimizer = optax.chain(optax.sgd(1.0), curvax.clip_logits(10.0))
      >>> params = {"query": jnp.ones((1, 2, 1)), "value": jnp.ones(2)}
      >>> zero = {"query": jnp.zeros((1, 2, 1)), "value": jnp.zeros(2)}
      >>> logits = jnp.array([5.0, 40.0])
      >>> state = optimizer.init(params)
      >>> updates, _ = optimizer.update(zero, state, params, max_logits={"query": logits[:, None]})
      >>> optax.apply_updates(params, updates)["query"].ravel().tolist()
      [1.0, 0.5]
    """
    powers = power if isinstance(power, Mapping) else {"*": power}
    for pattern, value in powers.items():
        Number("[0, inf)").check("power" if powers is not power else f"power[{pattern!r}]", value)

    def power_of(name: str) -> jax.typing.ArrayLike:
        alpha = next((value for pattern, value in powers.items() if matches(name, pattern)), None)
        if alpha is None:
            raise ValueError(
                f"power must have a pattern for every parameter in max_logits; {name!r} matches "
                f"none of {', '.join(map(repr, powers))}."
            )
        return alpha

    def clipped(name: str, u: Any, w: Any, largest: Any) -> jax.Array:
        dtype = np.promote_types(jnp.result_type(u, w), np.float32)
        s = jnp.asarray(largest, dtype)
        fits = all(a in (1, b) for a, b in zip(s.shape[::-1], w.shape[::-1], strict=False))
        if s.ndim > w.ndim or not fits:
            raise ValueError(
                f"max_logits: the statistic of {name!r} must broadcast against the parameter's "
                f"shape {w.shape}, got shape {s.shape}."
            )
        s = s.reshape((1,) * (w.ndim - s.ndim) + s.shape)
        above = (s > threshold) & jnp.isfinite(s)
        factor = jnp.where(above, threshold / jnp.where(above, s, 1), 1) ** power_of(name)
        wide = w.astype(dtype)
        return jnp.where(above, factor * (wide + u) - wide, u.astype(dtype)).astype(u.dtype)

    def update(
        updates: Any, state: Any, params: Any = None, *, max_logits: Any = None, **others: Any
    ):
        if max_logits is None or (isinstance(max_logits, Mapping) and not max_logits):
            return updates, state
        if params is None:
            raise ValueError("params must be given to update: clip_logits reads them.")
        weights, named = named_leaves(params).present(), named_leaves(updates)
        _check_paths(max_logits, weights)
        leaves = named.present()
        for name, largest in max_logits.items():
            leaves[name] = clipped(name, leaves[name], weights[name], largest)
        return named.rebuild(leaves), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _check_paths(max_logits: Any, weights: Mapping[str, Any]) -> None:
    """Requires a mapping from the paths of parameters; not a pattern, layer or tree."""
    entries = max_logits if isinstance(max_logits, Mapping) else dict.fromkeys([shown(max_logits)])
    for path in entries:
        if not isinstance(path, str) or path not in weights or isinstance(entries[path], Mapping):
            raise ValueError(
                "max_logits must be a mapping from the paths of parameters to statistics, such as "
                f"{{{next(iter(weights), 'query/kernel')!r}: ...}}; got {shown(path)}. The paths "
                f"are {first_of(weights)}."
            )
