"""The counters and figures of an optimizer's state, parameter by parameter."""

from typing import Any

import jax
import jax.numpy as jnp

from .._paths import named_leaves
from ._summary import owned_arrays

COLUMNS = (
    *("nonfinite", "skipped", "spikes", "restarted", "checks", "refreshes", "rejected"),
    *("failures", "indefinite", "damping", "error", "proxy"),
)
"""The fields of the state that the report shows, in this order."""


def report(optimizer: Any, params: Any, state: Any) -> str:
    """A table of the events of each parameter so far, from the counters in the state.

    * `nonfinite`: numbers in the state that are NaN or infinite now;
    * `skipped`: steps whose gradient was not finite (NaN, infinite, or squares that overflow) and
      was replaced by zero; for low-rank methods also steps before the first basis;
    * `spikes`: steps that `skip_spikes` left out;
    * `restarted`: how often a part of the state that was not finite started anew; where that part
      had made the update non-finite, the update of this step was zero;
    * `checks`: how often a factor or basis was due; `refreshes`: how often it was recomputed;
    * `rejected`: checks whose result was not finite, so that the last good one stayed in use, or
      whose statistic or gradient was all zero;
    * `failures`: failed decompositions: of a momentum to orthogonalize (the direction was zero), or
      of a quantized factor by Cholesky (which kept its value);
    * `indefinite`: refreshes of a stored root whose statistic had a negative eigenvalue;
    * `error`: the estimated error of a stored root at its last refresh. With an adaptive
      policy the `damping` in use, and `proxy`, the figure on which it decided at the last check.

    Args:
      optimizer, params, state: see `portable_state`.

    Returns:
      A Markdown table with one line per parameter: smallest and largest value where a parameter has
      several matrices or two factors. Columns that no parameter has are left out; a sentence says
      so if none has any, as with `optax.adamw`.

    Raises:
      ValueError: if `state` is not this optimizer's, for these parameters.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.asgo(0.1, refresh=2)
      >>> bad = {"dense": {"kernel": jnp.full((4, 8), jnp.nan), "bias": jnp.ones(8)}}
      >>> _, state = jax.jit(optimizer.update)(bad, optimizer.init(params), params)
      >>> print(curvax.report(optimizer, params, state))
      | parameter | skipped | restarted | checks | refreshes | rejected | indefinite |
      |---|---:|---:|---:|---:|---:|---:|
      | dense/bias | 0 | 0 | 1 | 1 | 0 | 0 |
      | dense/kernel | 1 | 0 | 1 | 0 | 1 | 0 |
    """
    values: dict[str, dict[str, list[jax.Array]]] = {}
    damage: dict[str, Any] = {}
    for owner, place, array in owned_arrays(optimizer, params, state):
        if jnp.issubdtype(array.dtype, jnp.inexact):
            damage[owner] = damage.get(owner, 0) + jnp.sum(~jnp.isfinite(array))
        fields = place.split("/")
        column = next((name for name in COLUMNS if name in fields), None)
        if column is not None:
            values.setdefault(column, {}).setdefault(owner, []).append(array.reshape(-1))
    if any(damage.values()):
        values["nonfinite"] = {name: [bad[None]] for name, bad in damage.items()}
    if not values:
        return (
            f"Nothing to report: the state of this optimizer has none of {', '.join(COLUMNS)}. "
            "curvax.summarize shows what it has."
        )
    columns = [name for name in COLUMNS if name in values]
    rows = [
        f"| {name} | {' | '.join(_range(values[c].get(name, [])) for c in columns)} |"
        for name in named_leaves(params).present()
    ]
    head = [f"| parameter | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return "\n".join([*head, *rows])


def _range(arrays: list[jax.Array]) -> str:
    """The smallest and largest value, or one of them if they print alike."""
    if not arrays:
        return ""
    together = jnp.concatenate(arrays)
    shown = [
        f"{x:,}" if jnp.issubdtype(together.dtype, jnp.integer) else f"{x:.2g}"
        for x in (jnp.min(together).item(), jnp.max(together).item())
    ]
    return " to ".join(dict.fromkeys(shown))
