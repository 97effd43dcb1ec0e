r"""The side of the weights: what a step does with them beside the direction.

A step with learning rate $\eta$ and direction $D$ adds the update $\Delta = -\eta D$ to weights
$W$; an optimizer that gets the direction as its gradient (`base=`) makes another $\Delta$. A value
of `weights=` changes updates in two phases: `before`, where the formulas change $D$, and `after`,
where they change the weights that the step reaches. `_weights_values.py` has the other values.

*Numerics.* float32 at least, rounded to the update's dtype at the end. *Cost*: a few passes over
the matrix. *State*: a counter of steps, if the learning rate is a schedule.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._counts import next_step
from .._stacks import each_array
from .._validate import Value, check_value


class Weights(Value):
    """The type of `weights=`: what a step does with the weights beside the direction."""

    rescales: bool = False  # whether it only multiplies each matrix, of updates or of weights
    forgets: bool = False  # whether matrices have the lengths that it sets, whatever they had

    def before(self, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        """The step of matrices `(..., m, n)` with weights `w` and learning rate `rate`.

        `step` is the update Δ of the descent, which has the rate in it, or that of the part before.
        """
        return step

    def after(self, update: jax.Array, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        """The update from the weights `w` before the step to those after it.

        `update` is that of the part before, at first the step itself, and `step` the step as the
        last part has it `before`.
        """
        return update


@dataclasses.dataclass(frozen=True)
class Chain(Weights):
    parts: tuple[Weights, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must have a value such as curvax.weights.hyperball(); got ().")
        for i, part in enumerate(self.parts):
            check_value(f"parts[{i}]", part, Weights, "a value such as curvax.weights.hyperball()")
        setting = next((part for part in self.parts if part.forgets), None)
        idle = [part for part in self.parts if part.rescales and part is not setting]
        if setting is not None and idle:
            raise ValueError(
                f"parts: {idle[0]!r} has no effect beside {setting!r}, which sets the lengths of "
                "updates and weights; leave out one of them."
            )

    def before(self, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        for part in self.parts:
            step = part.before(step, w, rate)
        return step

    def after(self, update: jax.Array, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        for part in self.parts:
            update = part.after(update, step, w, rate)
        return update


def chain(*parts: Weights) -> Chain:
    r"""Several values, in order: first what they do with directions, then what with weights.

    .. math::
      D \leftarrow b_k(\cdots b_1(D)), \qquad W \leftarrow a_k(\cdots a_1(W - \eta D))

    for the two phases :math:`b_i` and :math:`a_i` of each value; all read the weights from before
    the step. A brake with `pin` and `hyperball` have both, the other brake and decay the second
    one, which takes weights off the sphere behind `hyperball`, and `floor` the first one. For a
    schedule of a number, inject a function of it that makes the optimizer.

    Args:
      *parts: values of `curvax.weights`.

    Raises:
      ValueError: if there is none, or one has no effect, as a brake without `pin` or the floor of
        a matrix beside `hyperball`.

    Example:
      The weights' side of the record of modded-nanogpt's track 3 (#46):

      >>> import curvax
      >>> recorded = curvax.weights.chain(
      ...     curvax.weights.brake(0.5, pin=True),
      ...     curvax.weights.floor(0.3825, unit="column"),
      ...     curvax.weights.decay(0.025, cautious=True, moved=True),
      ... )
      >>> optimizer = curvax.muon(0.02, weights=recorded)
    """
    return Chain(parts)


class WeightsState(NamedTuple):
    """State of `on_weights`, if the learning rate is a schedule."""

    count: jax.Array  # t, int32 scalar


def on_weights(
    weights: Weights, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Changes the updates of a descent with this learning rate by `weights`."""

    def init(params: Any) -> Any:
        return WeightsState(jnp.zeros([], jnp.int32)) if callable(learning_rate) else ()

    def update(x: jax.Array, state: Any, w: jax.Array | None = None) -> tuple[jax.Array, Any]:
        if w is None:
            raise ValueError("params must be given to update: weights= reads the weights.")
        rate = learning_rate
        if callable(learning_rate):
            rate, state = learning_rate(state.count), WeightsState(next_step(state.count))
        dtype = np.promote_types(np.promote_types(x.dtype, w.dtype), np.float32)
        rate = jnp.asarray(rate, dtype)
        step, w = x.astype(dtype), w.astype(dtype)
        step = weights.before(step, w, rate)
        return weights.after(step, step, w, rate).astype(x.dtype), state

    return each_array("weights=", init, update, work=None)
