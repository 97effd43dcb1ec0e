r"""Skipping spikes: steps whose gradient is finite, but far longer than usual.

For the norm $n_t$ of a gradient and its running norm $\rho$,

$$\text{spike if } n_t > c\,\rho_{t-1}, \qquad \rho_t = \rho_{t-1} + w_t\,(\min(n_t,\,
c\,\rho_{t-1}) - \rho_{t-1}), \qquad w_t = \max(1 - b,\ 1/k)$$

for the $k$-th gradient that is not zero. A spike is skipped as the guard skips a gradient that is
not finite: the inner transformation sees a zero gradient, and the update is zero. So no gradient
longer than $c\,\rho$ reaches the statistics.

*A lasting change is followed.* A skipped gradient raises $\rho$ by the factor $g = b + (1-b)\,c$,
or by more among the first $1/(1-b)$ gradients. After a lasting growth by $F$, $\lceil \log(F/c) /
\log g \rceil$ gradients are skipped: by default ($g = 1.45$) 7 for $F = 100$, 99 for $F = 10^{17}$.

*Zero gradients* do not change $\rho$. The first `warmup_steps` other gradients are never spikes. A
finite gradient whose squares overflow always is one. *Non-finite* gradients pass unchanged; the
guard handles them. *Cost*: one pass over the gradient; 12 bytes of state per matrix.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._arrays import check_matrices
from ._counts import counters
from ._paths import is_placeholder, named_leaves
from ._recording import PerParameter, record
from ._trees import map_unzip, widened
from ._validate import as_transformation, check_state_given, checked


@counters
class SpikeCounts(NamedTuple):
    """The counters of `skip_spikes`: skipped steps, and gradients other than zero."""

    value: Any
    names = ("spikes", "seen")


class SpikesState(NamedTuple):
    running_norm: Any  # ρ, float32 at least: (...) per leaf, or (leaves,) for all
    counts: Any  # SpikeCounts, of the same shapes
    inner: Any  # state of the inner transformation


@checked
def skip_spikes(
    inner: optax.GradientTransformation,
    ratio: jax.typing.ArrayLike = 10.0,
    *,
    decay: jax.typing.ArrayLike = 0.95,
    warmup_steps: int = 10,
    unit: str = "parameter",
) -> optax.GradientTransformationExtraArgs:
    """Skips the steps of parameters whose gradients are far longer than usual.

    Around a full optimizer it judges each parameter by itself. To judge each matrix (of a scanned
    stack, a head, a block), put it around the direction: `assemble(skip_spikes(scale_by_soap(),
    unit="matrix"), 1e-3)`. `report` shows the skipped steps in the column `spikes`.

    Args:
      inner: the transformation.
      ratio: c, above 1; a gradient is a spike if its Frobenius norm is above `ratio` times ρ.
      decay: b, decay rate of the running norm.
      warmup_steps: the number of first gradients other than zero that are never spikes.
      unit: the unit that is judged by itself: "parameter", of any shape; or "matrix", the last two
        axes of each leaf, for transformations on batches of matrices.

    Returns:
      The transformation; extra arguments are passed through.

    Raises:
      ValueError: naming the argument that is outside its range, or a leaf that is not a matrix.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> optimizer = curvax.skip_spikes(optax.sgd(1.0), warmup_steps=1)
      >>> state = optimizer.init(jnp.ones(2))
      >>> for length in (1.0, 100.0, 2.0):
      ...     update, state = optimizer.update(length * jnp.ones(2), state)
      ...     print(update.tolist())
      [-1.0, -1.0]
      [-0.0, -0.0]
      [-2.0, -2.0]
    """
    inner = as_transformation("inner", inner)
    of_matrices = unit == "matrix"

    # Trees, not `each_array`: `inner` takes one whole, and "parameter" judges all leaves at once.
    def norms(tree: Any) -> Any:
        if of_matrices:
            return jax.tree.map(_frobenius_norm, tree)
        each = [_frobenius_norm(x, axis=None) for x in jax.tree.leaves(tree)]
        return jnp.stack(each) if each else jnp.zeros(0)

    def kept(keep: Any, tree: Any) -> Any:
        if of_matrices:
            keep = jax.tree.map(lambda ok: ok[..., None, None], keep)
        else:
            keep = jax.tree.structure(tree).unflatten(list(keep))
        return jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), keep, tree)

    def init(params: Any) -> SpikesState:
        if is_placeholder(params):
            return SpikesState(jnp.zeros(1), SpikeCounts.zeros((1,)), inner.init(params))
        if of_matrices:
            check_matrices(params, 'skip_spikes(unit="matrix")')
        zeros = jax.tree.map(jnp.zeros_like, norms(params))
        counts = jax.tree.map(lambda x: SpikeCounts.zeros(x.shape), zeros)
        if not of_matrices:
            names = tuple(named_leaves(params).present())
            record(PerParameter(names, (zeros, counts.value)))
        return SpikesState(zeros, counts, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_state_given(state)

        def judged(norm: jax.Array, running: jax.Array, counts: SpikeCounts) -> Any:
            before = counts.of("seen")
            known = jnp.isfinite(running) & (running > 0)
            overflown = jnp.isposinf(norm)
            counted = (norm > 0) & (known | ~overflown)  # False for NaN
            most = jnp.where(known, ratio * running, norm)
            spike = (counted & known & (norm > most) & (before >= warmup_steps)) | overflown
            # `running` is 0 before the first norm, and after the state started anew.
            weight = jnp.where(known, jnp.maximum(1 - decay, 1 / (before + 1)), 1)
            running = jnp.where(known, running, 0)
            new = running + weight * (jnp.minimum(norm, most) - running)
            counts = counts.plus(spikes=spike, seen=counted)
            return ~spike, jnp.where(counted, new, running).astype(running.dtype), counts

        arguments = norms(updates), state.running_norm, state.counts
        keep, running, counts = map_unzip(3, judged, *arguments)
        moved, inner_state = inner.update(kept(keep, updates), state.inner, params, **extra_args)
        return kept(keep, moved), SpikesState(running, counts, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _frobenius_norm(x: Any, axis: tuple[int, ...] | None = (-2, -1)) -> jax.Array:
    """Frobenius norms: infinite if only the squares overflow, NaN if an entry is not finite."""
    wide = widened(jnp.asarray(x))
    norm = jnp.sqrt(jnp.sum(wide * wide, axis=axis))
    return jnp.where(jnp.isfinite(wide).all(axis=axis), norm, jnp.nan)
