"""Statistics in their bases, in any storage.

`H = Uᵀ L U` is nearly diagonal, and its diagonal spans many orders of magnitude. A storage that
rounds gets `H_ij / √(H_ii H_jj)`, and the diagonal stays beside it. So near the identity `packed`
needs no Cholesky factor.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..linalg._platforms import diagonals, identity
from ._storage import Storage


class GradedFactor(NamedTuple):
    """A statistic in its basis, in a storage that rounds."""

    correlation: Any  # H with a unit diagonal, (..., d, d) in stored form
    roots: jax.Array  # of the diagonal, (..., d)


@dataclasses.dataclass(frozen=True)
class Graded:
    """What encodes and decodes statistics in their bases."""

    storage: Storage

    def encode_factor(self, x: jax.Array, previous: Any) -> Any:
        order = x.shape[-1]
        if self.storage.exact(order):
            return self.storage.encode_factor(x, previous)
        roots = jnp.sqrt(jnp.maximum(diagonals(x), 0))
        across = roots[..., :, None] * roots[..., None, :]
        live = across > 0
        eye = jnp.broadcast_to(identity(order, x.dtype), x.shape)
        correlation = jnp.where(live, x / jnp.where(live, across, 1), eye)
        coded = self.storage.encode_correlation(correlation, previous and previous.correlation)
        factor = GradedFactor(coded, roots)
        if previous is None:
            return factor
        failed = self.failed(factor, previous)[..., None]
        return factor._replace(roots=jnp.where(failed, previous.roots, roots))

    def failed(self, stored: Any, previous: Any) -> jax.Array:
        """Whether a decomposition failed and the previous statistic stays, bool `(...)`."""
        if not isinstance(stored, GradedFactor):
            return jnp.bool_(False)
        if not hasattr(stored.correlation, "failures"):
            return jnp.zeros(stored.roots.shape[:-1], bool)
        return stored.correlation.failures != previous.correlation.failures

    def decode_factor(self, stored: Any) -> jax.Array:
        if not isinstance(stored, GradedFactor):
            return self.storage.decode_factor(stored)
        roots = stored.roots
        correlation = self.storage.decode_correlation(stored.correlation, roots.shape[-1])
        return correlation * roots[..., :, None] * roots[..., None, :]
