r"""When subspaces are refreshed: by a period, or when little of the gradient is left in them.

`every(k)` serves as everywhere. A policy for subspaces alone is a value with a `schedule`, an
`Every`, and `renews(norm)`, asked at its steps for the norms of the projected gradients.

With `below_norm` a basis is computed anew at a check at which $\|U^\top G\|_F \le \varsigma$, with
the basis of the last refresh (Refael et al., SUMO, arXiv:2505.24749, Algorithm 1, the criterion in
place of a period).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._validate import check_interval, check_positive_int
from ._policy import Every, Refresh, as_policy, every


@dataclasses.dataclass(frozen=True)
class BelowNorm:
    """See `below_norm`."""

    threshold: Any
    check_every: int

    @property
    def schedule(self) -> Every:
        """The steps at which subspaces are checked."""
        return every(self.check_every, offset=1)

    def renews(self, norm: jax.Array) -> jax.Array:
        """Whether a subspace with this norm of the projected gradient is found anew."""
        return norm <= self.threshold


def below_norm(threshold: jax.typing.ArrayLike, *, check_every: int = 1) -> BelowNorm:
    """Refreshes a subspace when the norm of the projected gradient is at most `threshold`.

    The first step refreshes in any case. The projection for a check costs `2mnr` FLOPs.

    Args:
      threshold: ς, a Frobenius norm.
      check_every: steps between checks.

    Raises:
      ValueError: naming the argument that is outside its range.
    """
    check_interval("threshold", threshold, 0.0)
    check_positive_int("check_every", check_every)
    return BelowNorm(threshold, check_every)


SubspaceRefresh = Refresh | BelowNorm


def as_subspace_policy(refresh: Any, *, offset: int) -> Any:
    """`refresh` as a policy for subspaces; an integer is a period, with the method's own offset.

    Raises:
      ValueError: if it is neither a positive integer nor a policy.
    """
    policy = refresh
    if not hasattr(refresh, "renews"):
        policy = as_policy(refresh, offset=offset, first=True)
    check_subspace_refresh(policy)
    return policy


def check_subspace_refresh(refresh: Any) -> None:
    """Requires a refresh policy that subspaces can follow.

    Raises:
      ValueError: if it is no policy, or one for symmetric factors.
    """
    renews = hasattr(refresh, "renews") and isinstance(getattr(refresh, "schedule", None), Every)
    if not (isinstance(refresh, Every) or renews):
        raise ValueError(
            "refresh of a subspace must be curvax.every(k) or curvax.policies.below_norm(threshold)"
            f" (it has no symmetric factor for another policy to look at), got {refresh!r}."
        )
