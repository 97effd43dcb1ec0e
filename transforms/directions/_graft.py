r"""Grafting: the direction of one transformation with the length of another, per matrix.

$$D = \hat G\, \|T(G)\| \,/\, \|\hat G\|$$

for the direction $\hat G$ and the transformation $T$ that sets the length: the identity (norm
grafting; Li et al., 4-bit Shampoo, Algorithm 2 line 15; Anil et al., 2020) or Adam's direction
(Adam grafting; Nam and Ahn, arXiv:2606.02365, J.1).

*Numerics.* Frobenius norms per matrix in float32 at least, for entries from 1e-30 to 1e30; if
$\hat G$ is zero, $D$ is zero.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._arrays import check_matrices
from .._stacks import check_directions
from .._trees import in_full_range, widened
from .._validate import Value, check_fields, check_transformation
from ..linalg._numerics import rescaled
from ._moment_ratio import adam as adam_direction


class GraftState(NamedTuple):
    direction: Any
    length: Any


def graft(
    direction: optax.GradientTransformation, length: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Gives each matrix of `direction`'s updates the Frobenius norm of `length`'s.

    Args:
      direction: transformation of the gradient that gives the direction.
      length: transformation of the gradient that gives the norm, such as `optax.scale_by_adam()`
        (Adam grafting); `None` is the gradient itself (norm grafting).

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> muon_with_adams_length = curvax.graft(curvax.scale_by_muon(), optax.scale_by_adam())
    """
    length = optax.identity() if length is None else length
    check_transformation("direction", direction)
    check_transformation("length", length)
    grafted = _graft(direction, length)

    def init(params: Any) -> GraftState:
        check_matrices(params, "graft")
        state: Any = grafted.init(params)
        wide = widened(params)
        check_directions("graft", direction, params, state.direction, params)
        check_directions("graft", length, wide, state.length, wide)
        return state

    return optax.GradientTransformation(init, grafted.update)


def _graft(
    direction: optax.GradientTransformation, length: Any, warmup_steps: int = 0
) -> optax.GradientTransformation:
    """`graft` without checks, whose first `warmup_steps` updates are those of `length`."""

    def init(params: Any) -> GraftState:
        return GraftState(direction.init(in_full_range(params)), length.init(widened(params)))

    def update(updates: Any, state: Any, params: Any = None):
        arguments = in_full_range(updates), state.direction, in_full_range(params)
        directions, direction_state = direction.update(*arguments)
        # In bfloat16, Adam's second moment would stop changing.
        lengths, length_state = length.update(widened(updates), state.length, widened(params))

        def grafted(direction: jax.Array, length: jax.Array, g: jax.Array) -> jax.Array:
            x = rescaled(direction, length)  # Alg. 2, line 15
            if warmup_steps:
                x = jnp.where(length_state.count <= warmup_steps, length.astype(x.dtype), x)
            return x.astype(g.dtype)

        trees = directions, lengths, updates
        return jax.tree.map(grafted, *trees), GraftState(direction_state, length_state)

    return optax.GradientTransformation(init, update)


class Graft(Value):
    """The type of `graft=` of `shampoo`: the length of its direction."""

    limits: bool = False  # whether the direction is to keep its own length, up to its bound
    leads: bool = False  # whether a warm-up, in which the direction is 0, takes steps of `length`

    def length(self, average: Any, b2: Any) -> optax.GradientTransformation | None:
        """The transformation that gives the length; None leaves the direction its own.

        `average` averages gradients, or is None; `b2` is the statistics' decay rate, None for sums.
        """
        return None

    def around(
        self, direction: optax.GradientTransformation, average: Any, b2: Any, warmup_steps: int
    ) -> optax.GradientTransformation:
        """The direction with this length; it is 0 in the first `warmup_steps`."""
        length = self.length(average, b2)
        if length is None:
            return direction
        return _graft(direction, length, warmup_steps if self.leads else 0)


@dataclasses.dataclass(frozen=True)
class NormGraft(Graft):
    def length(self, average: Any, b2: Any) -> optax.GradientTransformation:
        """Of the matrix that is preconditioned."""
        return optax.identity() if average is None else average


@dataclasses.dataclass(frozen=True)
class AdamGraft(Graft):
    b1: Any = 0.95
    eps: Any = 1e-8
    leads = True

    __post_init__ = check_fields

    def length(self, average: Any, b2: Any) -> optax.GradientTransformation:
        return adam_direction(self.b1, 0.999 if b2 is None else b2, self.eps)


@dataclasses.dataclass(frozen=True)
class LimitGraft(Graft):
    limits = True  # in `precondition`


def norm() -> NormGraft:
    """Takes the length of the gradient, or of its average."""
    return NormGraft()


def adam(b1: jax.typing.ArrayLike = 0.95, eps: jax.typing.ArrayLike = 1e-8) -> AdamGraft:
    """Takes the length of Adam's direction, whose second decay rate is that of the statistics.

    Args:
      b1: Adam's first decay rate.
      eps: Adam's epsilon.

    Raises:
      ValueError: if `b1` is not in [0, 1) or `eps` is negative.
    """
    return AdamGraft(b1, eps)


def limit() -> LimitGraft:
    """Keeps the direction's own length, up to the bound of roots that contain each gradient."""
    return LimitGraft()


GRAFTS = {"norm": NormGraft(), "adam": AdamGraft(), "limit": LimitGraft(), None: None}
"""The plain grafts, by name."""
