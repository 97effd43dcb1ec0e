"""Refresh policies: when roots, bases and subspaces are due, and which of them are computed anew.

A policy is a value, not a function (`optax.inject_hyperparams` takes callables for schedules). It
has

* `schedule`, an `Every`: the steps at which matrices are due;
* `examines`: what it looks at when one is due. This decides which transformations take it:

  * `None`: nothing; whatever is due is refreshed. All transformations take it.
  * "eigenpairs": a `Check`, a symmetric statistic and the eigenpairs of its last refresh.
    `precondition` and `in_eigenbasis` take it.
  * "damping": the same, and the damping of an inverse root, which it adapts. `precondition` takes
    it.
  * "projection": a `ProjectionCheck`, how much of a gradient its subspace holds. `in_subspace`
    takes it.

* `examine(check) -> Verdict`, asked of every due matrix unless `examines` is `None`;
* `max_damping`, with "damping" alone: the largest damping it asks for (infinity if there is none).

To write one, write a frozen dataclass with these, such as

    @dataclasses.dataclass(frozen=True)
    class TraceGrowth:
        schedule: Every
        growth: float

        examines = "eigenpairs"

        def examine(self, check: Check) -> Verdict:
            grown = jnp.trace(check.statistic) > self.growth * jnp.sum(check.eigenvalues)
            return Verdict(check.first | grown)

The transformation does the rest: it decomposes only what a verdict asks for, builds the root
`Q (d + damping)^(-1/p) Qᵀ`, counts, and rejects what is not finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from .._validate import check_bool, check_positive_int

REQUIRED: dict[Any, tuple[str, ...]] = {
    None: (),
    "eigenpairs": ("examine",),
    "damping": ("examine", "max_damping"),
    "projection": ("examine",),
}
"""What a policy may examine, and what it needs for that besides its schedule."""


class RootDamping(NamedTuple):
    """What a check tells of an inverse root; an eigenbasis has no damping."""

    damping: jax.Array  # ε in use
    base_damping: Any  # ε0
    root: int  # p


class Check(NamedTuple):
    """What a policy sees of one symmetric statistic."""

    statistic: jax.Array  # L now, (d, d)
    eigenvectors: jax.Array  # Q of the last refresh, (d, d)
    eigenvalues: jax.Array  # its eigenvalues, not damped, (d,)
    first: jax.Array  # whether there has been no refresh yet
    root_damping: RootDamping | None = None  # of an inverse root; None for an eigenbasis


class ProjectionCheck(NamedTuple):
    """What a policy sees of one subspace."""

    norm: jax.Array  # ‖UᵀG‖ (Frobenius) in the basis U of the last refresh
    first: jax.Array  # whether there has been no refresh yet


class Verdict(NamedTuple):
    """What a policy says of one matrix; of what is None, nothing changes."""

    refresh: Any  # bool: whether to compute it anew (a root with the base damping)
    proxy: jax.Array | None = None  # the number on which that was decided, for the record
    damping: jax.Array | None = None  # of a root that is not refreshed: ε from now on
    eigenvalues: jax.Array | None = None  # of a root that is not refreshed: its eigenvalues


@dataclasses.dataclass(frozen=True)
class Every:
    """See `every`."""

    period: int
    offset: int = 0
    first: bool = True
    stagger: bool = False

    examines = None

    @property
    def schedule(self) -> Every:
        """The steps at which everything is refreshed: this policy itself."""
        return self

    def phase(self, count: jax.Array) -> jax.Array:
        """Steps since the last due one, `0 … period - 1`."""
        return (count - self.offset) % self.period

    def due(self, count: jax.Array) -> jax.Array:
        """Whether step `count` (from 1) is due, without regard to staggering."""
        due = self.phase(count) == 0
        return due | (count == 1) if self.first else due


@runtime_checkable
class RefreshPolicy(Protocol):
    """What `refresh=` takes; see the module."""

    @property
    def schedule(self) -> Every:
        """The steps at which matrices are due."""
        ...

    @property
    def examines(self) -> str | None:
        """What it looks at: None, "eigenpairs", "damping" or "projection"."""
        ...


Refresh = int | RefreshPolicy


def every(k: int, *, offset: int = 0, first: bool = True, stagger: bool = False) -> Every:
    """Refreshes at every step `t` with `t mod k = offset mod k`.

    Args:
      k: period in steps.
      offset: place within the period; 1 makes it steps 1, k + 1, 2k + 1, …
      first: whether step 1 refreshes in any case.
      stagger: spread the refreshes of the factors over the period, balanced by cost, so that no
        step takes much longer than others. Each factor still has period k. With `first`, all are
        refreshed at step 1 as well.

    Raises:
      ValueError: if `k` is not a positive integer or `offset` not an integer.

    Example:
      >>> import curvax
      >>> policy = curvax.every(3, offset=1)
      >>> [t for t in range(1, 9) if policy.due(t)]
      [1, 4, 7]
    """
    check_positive_int("k", k)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(f"offset must be an integer, got {offset!r}.")
    check_bool("first", first)
    check_bool("stagger", stagger)
    return Every(k, offset, first, stagger)


def as_policy(refresh: Any, *, offset: int, first: bool = True) -> RefreshPolicy:
    """`refresh` as a policy; an integer is a period, with the method's own offset and start.

    Raises:
      ValueError: if `refresh` is neither a positive integer nor a policy.
    """
    if is_policy(refresh):
        return refresh
    if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
        raise ValueError(
            "refresh must be a period of at least 1 step or a policy such as curvax.every(10), "
            f"got {refresh!r}."
            + " optax.inject_hyperparams needs it in static_args."
            * hasattr(refresh, "dtype")
        )
    return every(refresh, offset=offset, first=first)


def check_refresh(refresh: Any, can_show: tuple[str, ...]) -> None:
    """Requires a refresh policy that examines nothing, or something that it can be shown.

    Raises:
      ValueError: naming what is allowed.
    """
    if not is_policy(refresh):
        raise ValueError(f"refresh must be a policy such as curvax.every(10), got {refresh!r}.")
    if refresh.examines not in (None, *can_show):
        raise ValueError(
            f"refresh must be curvax.every(k) or a policy that examines "
            f"{' or '.join(map(repr, can_show))}; got {refresh!r}, which examines "
            f"{refresh.examines!r}."
        )
    missing = [name for name in REQUIRED[refresh.examines] if not hasattr(refresh, name)]
    if missing:
        raise ValueError(
            f"refresh examines {refresh.examines!r} and needs {' and '.join(missing)} for that; "
            f"got {refresh!r}."
        )


def is_policy(refresh: Any) -> bool:
    """Whether this is a refresh policy (and not a class or function that makes one)."""
    return isinstance(refresh, RefreshPolicy) and not callable(refresh)


def verdict_of(policy: Any, check: Check | ProjectionCheck, proxy: Any = None) -> Verdict:
    """What a policy says of one matrix, with arrays; the last `proxy` stays if it gives none."""
    verdict = policy.examine(check)
    if verdict.proxy is not None:
        proxy = verdict.proxy.astype(jnp.float32)
    return verdict._replace(refresh=jnp.asarray(verdict.refresh), proxy=proxy)
