r"""Running second moments of one side of a gradient, in whatever form they are stored."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._due import visit_all
from ._inverse_root import HIGHEST
from ._storage import Storage


@dataclasses.dataclass(frozen=True)
class StatisticRule:
    """How statistics are averaged and kept."""

    storage: Storage
    b2: Any  # None sums

    def one_by_one(self, *orders: int) -> bool:
        """Whether matrices of one of these orders are to be decoded one at a time."""
        return any(map(self.storage.one_by_one, orders))

    def accumulated(self, factor: Any, s: jax.Array, left: bool, count: jax.Array) -> Any:
        """The factor with `s sᵀ`, or on the right `sᵀ s`, taken in, for `s (..., m, n)`."""

        def taken_in(entry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            stored, s = entry
            old = self.storage.decode_factor(stored)
            x = s.astype(old.dtype)
            gram = jnp.matmul(*((x, x.mT) if left else (x.mT, x)), precision=HIGHEST)
            new = old + gram if self.b2 is None else self.b2 * old + (1 - self.b2) * gram
            # A running average would keep a NaN forever: what is not finite is not taken in. No
            # entry of a Gram matrix is larger than the largest on its diagonal.
            finite = jnp.isfinite(jnp.diagonal(new, axis1=-2, axis2=-1)).all(axis=-1)
            coded = self.storage.encode_factor(jnp.where(finite[..., None, None], new, old), stored)

            def kept(a: jax.Array, b: jax.Array) -> jax.Array:
                return jnp.where(finite.reshape(*finite.shape, *[1] * (a.ndim - finite.ndim)), a, b)

            return jax.tree.map(kept, coded, stored), s

        entry = (factor.statistic, s)
        if self.one_by_one(s.shape[-2 if left else -1]):
            new, _ = visit_all(taken_in, entry, s.shape[:-2], count)
        else:
            new, _ = taken_in(entry)
        return factor._replace(statistic=new)
