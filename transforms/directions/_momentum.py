r"""Momentum: a running average or sum of the gradients, with an optional Nesterov look-ahead.

$$M_t = b_1 M_{t-1} + (1 - b_1)\, G_t \quad\text{("ema")} \qquad M_t = b_1 M_{t-1} + G_t
\quad\text{("sum")}$$

The output is $M_t$; with `nesterov` it is $b_1 M_t + (1-b_1) G_t$ ("ema") or $b_1 M_t + G_t$
("sum"). `bias_correction` ("ema" only) divides $M_t$ by $1-b_1^t$. With the look-ahead it divides
$M_t$ by $1-b_1^{t+1}$ and $G_t$ by $1-b_1^t$, as Adam with Nesterov momentum does (Dozat, 2016).

*Numerics.* $b_1 M$ is computed in the dtype of the state, as in Optax, the sum in the promoted
dtype of gradient and state; it is stored in `dtype`. The output has the gradient's dtype. *State*:
one array per leaf and a counter.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._counts import at_step, next_step
from .._recording import Meaning, record
from .._validate import check_state_given, checked
from ._weight_decay import mask_of, optional_decay

SUM = Meaning("momentum: a sum")


class MomentumState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    mu: Any  # M, shaped like the parameters

    first_moments = ("mu",)


@checked
def momentum(
    b1: jax.typing.ArrayLike = 0.95,
    *,
    accumulate: str = "ema",
    nesterov: bool = False,
    bias_correction: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Replaces gradients by their momentum; the module's docstring has the formulas.

    Args:
      b1: decay rate in [0, 1).
      accumulate: "ema" or "sum".
      nesterov: whether to look ahead by one step.
      bias_correction: whether to divide by the weight accumulated so far ("ema" only).
      dtype: dtype of the stored momentum; `None` is that of the parameters.

    Returns:
      A transformation of leaves of any shape.

    Raises:
      ValueError: if `b1` is outside [0, 1), if `accumulate` is unknown, or if `bias_correction` is
        given with "sum".

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> averaged = curvax.momentum(0.9, bias_correction=True)
      >>> grads = jnp.ones(2)
      >>> averaged.update(grads, averaged.init(grads))[0].round(3).tolist()
      [1.0, 1.0]
    """
    if bias_correction and accumulate == "sum":
        raise ValueError("bias_correction=True needs accumulate='ema'; a sum has no bias.")

    def init(params: Any) -> MomentumState:
        if accumulate == "sum":
            record(SUM)
        return MomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=dtype))

    def update(updates: Any, state: Any, params: Any = None):
        check_state_given(state)
        count = next_step(state.count)
        weight = 1 - b1 if accumulate == "ema" else 1.0
        # Gong et al., Eq. 33; with "sum" An et al., Eq. 11
        mu = jax.tree.map(lambda g, m: b1 * m + weight * g, updates, state.mu)
        ahead, gradient = mu, updates
        if bias_correction:
            at = next_step(count) if nesterov else count
            ahead = optax.tree.bias_correction(mu, b1, at)
            gradient = optax.tree.bias_correction(updates, b1, count)
        if nesterov:
            ahead = jax.tree.map(lambda m, g: b1 * m + weight * g, ahead, gradient)
        stored = jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu)
        ahead = jax.tree.map(lambda m, g: m.astype(g.dtype), ahead, updates)
        return ahead, MomentumState(count, stored)

    return optax.GradientTransformation(init, update)


@checked
def descend_with_momentum(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike,
    weight_decay: optax.ScalarOrSchedule,
    weight_decay_mask: Any,
) -> optax.GradientTransformation:
    r"""Descent whose momentum accumulates scaled directions, $M \leftarrow b_1 M + \mathrm{lr}\,D$.

    Under a schedule each direction keeps the learning rate of its own step. Weight decay is
    decoupled and does not enter the momentum.
    """

    def decay_at(count: Any) -> Any:
        return -at_step(learning_rate, count) * at_step(weight_decay, count)

    counts = callable(learning_rate) or callable(weight_decay)
    decay: Any = decay_at if counts else decay_at(None)
    decayed = optax.add_decayed_weights(decay, mask_of(weight_decay_mask))
    return optax.chain(
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(b1),  # OSGDM in section 2 of SUMO's paper
        optional_decay(weight_decay, decayed, counts=counts),
    )
