r"""One Kronecker factor: its statistic, its inverse root, and what becomes of them at a refresh.

All functions but `accumulated` and `applied` see a single factor `(d, d)`; batches are looped over.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._inverse_root import HIGHEST, eigh, from_eigen, root_eigenvalues
from ._refresh import Check, RefreshPolicy
from ._roots import solve_root
from ._storage import Storage


class Factor(NamedTuple):
    """One side's preconditioner of a batch of matrices; the order `d` is `m` or `n`."""

    statistic: Any  # L or R, stored form of (..., d, d)
    root: Any  # the inverse root in use, stored form of (..., d, d)
    eigenvectors: jax.Array | None  # Q of the last refresh (..., d, d), if the policy keeps it
    eigenvalues: jax.Array | None  # its eigenvalues, not damped, (..., d)
    damping: jax.Array  # ε in use, (...)
    proxy: jax.Array  # the policy's last figure: FOAM's h, the residual; float32 (...)
    error: jax.Array  # the solver's error estimate at the last refresh, float32 (...)
    checks: jax.Array  # times the factor was due, int32 (...)
    refreshes: jax.Array  # inverse roots computed anew, int32 (...)
    rejected: (
        jax.Array
    )  # checks whose statistic or root was not finite: nothing changed, int32 (...)


@dataclasses.dataclass(frozen=True)
class FactorRule:
    """The static choices that a preconditioner makes for all of its factors."""

    policy: RefreshPolicy
    storage: Storage
    root: int
    eps: Any
    damping: str
    solver: str
    b2: Any  # None sums
    initial: Any  # the statistic starts as initial · I

    def start(self, batch: tuple[int, ...], order: int, dtype: Any) -> Factor:
        """The factor of a batch before the first step: the root is the identity."""
        eye = jnp.broadcast_to(jnp.eye(order, dtype=dtype), (*batch, order, order))
        keeps = self.policy.keeps_eigenpairs
        return Factor(
            statistic=self.storage.encode_factor(self.initial * eye, None),
            root=self.storage.encode_root(eye),
            eigenvectors=jnp.copy(eye) if keeps else None,
            eigenvalues=jnp.zeros((*batch, order), dtype) if keeps else None,
            damping=jnp.full(batch, self.eps, dtype),
            proxy=jnp.zeros(batch, jnp.float32),
            error=jnp.zeros(batch, jnp.float32),
            checks=jnp.zeros(batch, jnp.int32),
            refreshes=jnp.zeros(batch, jnp.int32),
            rejected=jnp.zeros(batch, jnp.int32),
        )

    def accumulated(self, factor: Factor, s: jax.Array) -> Factor:
        """The factor with `s sᵀ` taken into its statistic, for `s (..., d, k)`."""

        def taken_in(stored: Any, s: jax.Array) -> Any:
            old = self.storage.decode_factor(stored)
            s = s.astype(old.dtype)
            gram = jnp.matmul(s, s.mT, precision=HIGHEST)
            new = old + gram if self.b2 is None else self.b2 * old + (1 - self.b2) * gram
            # A running average would keep a NaN forever: what is not finite is not taken in. No
            # entry of a Gram matrix is larger than the largest on its diagonal.
            finite = jnp.isfinite(jnp.diagonal(new, axis1=-2, axis2=-1)).all(axis=-1)
            new = jnp.where(finite[..., None, None], new, old)
            return self.storage.encode_factor(new, stored)

        return factor._replace(statistic=self._over_batch(taken_in, factor.statistic, s))

    def applied(self, factor: Factor, x: jax.Array, *, left: bool) -> jax.Array:
        """The root times `x (..., d, k)`; with the root on the right, `x (..., k, d)` times it."""

        def product(stored: Any, x: jax.Array) -> jax.Array:
            root = self.storage.decode_root(stored)
            x = x.astype(root.dtype)
            return root @ x if left else x @ root

        return self._over_batch(product, factor.root, x)

    def visited(self, factor: Factor) -> Factor:
        """A single factor after a check: what the policy says, done and counted."""
        statistic = self.storage.decode_factor(factor.statistic)
        if self.policy.keeps_eigenpairs:
            root, new, refresh = self._examined(factor, statistic)
        else:
            root, error = solve_root(statistic, self.root, self.eps, self.damping, self.solver)
            new, refresh = factor._replace(error=error.astype(jnp.float32)), jnp.bool_(True)
        new = new._replace(root=self.storage.encode_root(root))
        good = jnp.isfinite(root).all() & jnp.isfinite(statistic).all()
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, factor)
        return kept._replace(
            statistic=factor.statistic,
            proxy=new.proxy,
            checks=factor.checks + 1,
            refreshes=factor.refreshes + (refresh & good),
            rejected=factor.rejected + ~good,
        )

    def _examined(
        self, factor: Factor, statistic: jax.Array
    ) -> tuple[jax.Array, Factor, jax.Array]:
        assert factor.eigenvectors is not None and factor.eigenvalues is not None
        check = Check(
            statistic,
            factor.eigenvectors,
            factor.eigenvalues,
            factor.damping.astype(statistic.dtype),
            self.eps,
            self.root,
            factor.refreshes == 0,
        )
        verdict = self.policy.examine(check)
        q, d = jax.lax.cond(
            verdict.refresh,
            eigh,
            lambda _: (check.eigenvectors, verdict.eigenvalues),
            statistic,
        )
        damping = jnp.where(verdict.refresh, self.eps, verdict.damping)
        root = from_eigen(q, root_eigenvalues(d, self.root, damping.astype(d.dtype)))
        new = factor._replace(
            eigenvectors=q,
            eigenvalues=d,
            damping=damping.astype(factor.damping.dtype),
            proxy=verdict.proxy.astype(jnp.float32),
        )
        return root, new, jnp.asarray(verdict.refresh)

    def _over_batch(self, f: Any, stored: Any, x: jax.Array) -> Any:
        """`f(stored, x)` on the whole batch, or one matrix at a time if the storage wants that."""
        if not self.storage.one_by_one or x.ndim == 2:
            return f(stored, x)
        batch = x.shape[:-2]
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), (stored, x))
        out = jax.lax.map(lambda pair: f(*pair), flat)
        return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), out)
