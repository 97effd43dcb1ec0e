"""Refresh policies: when roots, bases and subspaces are due, and which of those are refreshed.

A policy is a value, because `optax.inject_hyperparams` takes callables for schedules. It has

* `schedule`, an `Every`: the steps at which matrices are due;
* `examines`: its input when a matrix is due, and so which transformations take it: `None`, every
  matrix that is due is refreshed (all of them); "eigenpairs", a `Check` of a symmetric statistic in
  the basis of its last refresh (`precondition` and `in_eigenbasis`); "damping", the same and the
  damping of an inverse root, which it adapts (`precondition`); "projection", a `ProjectionCheck` of
  how much of a gradient lies in its subspace (`in_subspace`);
* `examine(check) -> Verdict`, called for each due matrix unless `examines` is `None`;
* `max_damping`, with "damping" only: the largest damping that it sets (infinity if unbounded).

To write your own, define a frozen dataclass:

    @dataclasses.dataclass(frozen=True)
    class TraceGrowth(RefreshPolicy):
        schedule: Every
        growth: float

        examines = "eigenpairs"

        def examine(self, check: Check) -> Verdict:
            grown = jnp.trace(check.statistic) > self.growth * jnp.sum(check.eigenvalues)
            return Verdict(check.first | grown)

The transformation turns bases or makes roots where the verdict asks for it, counts, and rejects
non-finite results. `inject_hyperparams` makes arrays of fields that are floats.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._validate import MAX_INTEGER, Flag, Integer, Value, check_value, checked, if_injected, shown

TOGETHER = 24
"""With `stagger=True` about so many matrices take their turn together. On an H100 cuSOLVER
decomposes 24 of order 768 in 53 ms, 8 in 60 and one in 9 (`docs/xla.md`, "GPUs")."""

LEAST, GROWTH = 3, 100
"""With `first="growing"` the first period, and the steps in which it grows by 1."""


class RootDamping(NamedTuple):
    """The damping of an inverse root, for a `Check`."""

    damping: jax.Array  # ε in use
    base_damping: Any  # ε0
    root: int  # p


class Check(NamedTuple):
    """A policy's input for one symmetric statistic."""

    statistic: jax.Array  # H = UᵀLU now, in the basis of the last refresh, (d, d)
    eigenvalues: jax.Array  # its diagonal at the last refresh, (d,)
    first: jax.Array  # whether it has never been refreshed
    root_damping: RootDamping | None = None  # None for an eigenbasis, which has none


class ProjectionCheck(NamedTuple):
    """A policy's input for one subspace."""

    norm: jax.Array  # ‖UᵀG‖ (Frobenius) in the basis U of the last refresh
    first: jax.Array  # whether it has never been refreshed


class Verdict(NamedTuple):
    """A policy's decision about one matrix; a field that is None changes nothing."""

    refresh: Any  # bool: whether to refresh it (a root with the base damping)
    proxy: jax.Array | None = None  # the figure behind the decision, kept in the state
    damping: jax.Array | None = None  # if a root is not refreshed: its new ε
    eigenvalues: jax.Array | None = None  # if a root is not refreshed: its new eigenvalues


class RefreshPolicy(Value):
    """The type of `refresh=`; the module docstring explains it."""

    schedule: Any  # an Every: the steps at which matrices are due
    examines: str | None  # None, "eigenpairs", "damping" or "projection"
    examine: Any  # from a Check or ProjectionCheck to a Verdict


@dataclasses.dataclass(frozen=True)
class Every(RefreshPolicy):
    period: int
    offset: int = 0
    first: bool | str = True
    stagger: bool | int = False

    examines = None

    def __post_init__(self):
        if self.first not in ("doubling", "growing"):
            Flag().check("first (if not 'doubling' or 'growing')", self.first)
        if not isinstance(self.stagger, (bool, np.bool_)):
            Integer(1).check("stagger (if not True or False)", self.stagger)

    @property
    def together(self) -> int | None:
        """About how many matrices of a stack take their turn together; `None`: all."""
        if isinstance(self.stagger, (bool, np.bool_)):
            return TOGETHER if self.stagger else None
        return self.stagger

    @property
    def schedule(self) -> Every:
        """This policy itself: each matrix that is due is refreshed."""
        return self

    def due(self, count: jax.Array, phase: Any = 0) -> jax.Array:
        """Whether step `count` (from 1) is due for matrices of this phase, `0 … period - 1`."""
        period = self.period
        if self.first == "growing":
            period = jnp.minimum(period, LEAST + count // GROWTH)
        due = (count - self.offset) % period == phase % period
        if self.first == "doubling":
            return due | (count > 0) & (count < self.period) & (count & (count - 1) == 0)
        return due | (count == 1) if self.first else due


Refresh = int | RefreshPolicy


@checked
def every(
    k: int, *, offset: int = 0, first: bool | str = True, stagger: bool | int = False
) -> Every:
    """Refreshes at every step `t` with `t mod k = offset mod k`.

    Args:
      k: period in steps.
      offset: shift within the period; with 1 the steps are 1, k + 1, 2k + 1, …
      first: whether step 1 always refreshes; or "doubling": steps 1, 2, 4, 8, … below k do; or
        "growing": step 1 does, and k is at most `3 + t // 100` at step t. In the first steps a
        basis or root ages fast, so this saves most of what a long period loses in a short run ("How
        often is often enough" in `docs/performance_details.md`).
      stagger: spreads the refreshes of the factors over the period, balanced by cost, so that no
        step takes much longer than the others; those of `first` refresh all. Factors of a stack
        take turns in equal groups, which a GPU decomposes at once: of about 24 factors, or about as
        many as an integer says, and at most 2²⁴ numbers. Single factors take turns with 1, where a
        group would have less than 8 factors (or than the integer), and where GPUs decompose one by
        one too: with policies that examine factors, and in few bits.

    Raises:
      ValueError: if `k` is not a positive integer, `offset` not an integer, `first` neither a bool
        nor "doubling" or "growing", or `stagger` neither a bool nor a positive integer; all int32.

    Example:
      >>> import curvax
      >>> policy = curvax.every(3, offset=1)
      >>> [t for t in range(1, 9) if policy.due(t)]
      [1, 4, 7]
    """
    return Every(k, offset, first, stagger)


@dataclasses.dataclass(frozen=True)
class BelowNorm(RefreshPolicy):
    schedule: Every
    threshold: Any

    examines = "projection"

    def examine(self, check: ProjectionCheck) -> Verdict:
        return Verdict(check.first | (check.norm <= self.threshold))  # SUMO's Algorithm 1, block 1


@checked
def below_norm(threshold: jax.typing.ArrayLike, *, check_every: int = 1) -> BelowNorm:
    r"""Refreshes a subspace when the norm of the projected gradient is at most `threshold`.

    A check replaces the basis $U$ of the last refresh if $\|U^\top G\|_F \le \varsigma$ (Refael et
    al., SUMO, arXiv:2505.24749, Algorithm 1, the criterion in place of a period). Cost of a check:
    the projection, `2mnr` FLOPs.

    Args:
      threshold: ς, a Frobenius norm.
      check_every: f, steps between checks, at steps 1, f + 1, 2f + 1, … The first check refreshes.

    Raises:
      ValueError: if an argument is outside its range; the message names it.
    """
    return BelowNorm(Every(check_every, offset=1), threshold)


def as_policy(refresh: Any, *, offset: int, first: bool = True) -> RefreshPolicy:
    """`refresh` as a policy; an integer is a period, with the method's own `offset` and `first`."""
    if isinstance(refresh, RefreshPolicy):
        return refresh
    if refresh not in Integer(1):
        raise ValueError(
            f"refresh must be a period of at least 1 step (and at most {MAX_INTEGER}) or a policy "
            f"such as curvax.every(10), got {shown(refresh)}.{if_injected('refresh', refresh)}"
        )
    return every(int(refresh), offset=offset, first=first)


def check_refresh(refresh: Any, can_show: tuple[str, ...]) -> None:
    """Requires a refresh policy that examines nothing, or one of `can_show`."""
    check_value("refresh", refresh, RefreshPolicy, "a policy such as curvax.every(10)")
    if refresh.examines not in (None, *can_show):
        raise ValueError(
            f"refresh must be curvax.every(k) or a policy that examines "
            f"{' or '.join(map(repr, can_show))}; got {refresh!r}, which examines "
            f"{refresh.examines!r}."
        )
    required = {None: (), "damping": ("examine", "max_damping")}.get(refresh.examines, ("examine",))
    missing = [name for name in required if not hasattr(refresh, name)]
    if missing:
        raise ValueError(
            f"refresh examines {refresh.examines!r}, so it must define {' and '.join(missing)}; "
            f"got {refresh!r}."
        )


def verdict_of(policy: Any, check: Check | ProjectionCheck, proxy: Any = None) -> Verdict:
    """The verdict on one matrix, as arrays; what it leaves out is as it was, as the `proxy`."""
    verdict = policy.examine(check)
    refresh, damping, eigenvalues = jnp.asarray(verdict.refresh), None, None
    if verdict.proxy is not None:
        proxy = verdict.proxy.astype(jnp.float32)
    if isinstance(check, Check):
        eigenvalues = check.eigenvalues if verdict.eigenvalues is None else verdict.eigenvalues
        if check.root_damping is not None:
            old, base, _ = check.root_damping
            damping = jnp.where(refresh, base, old if verdict.damping is None else verdict.damping)
    return Verdict(refresh, proxy, damping, eigenvalues)
