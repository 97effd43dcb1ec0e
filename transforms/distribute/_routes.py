"""How matrices travel to the devices that own them, and their updates back.

They travel in one sharding: evenly over all devices (`_meshes.even_spec`), or on a mesh with
Explicit axes as they come. From there a device takes its own part of a stack, and its own matrices
of a round.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._meshes import even_spec, explicit_sharding, is_explicit, put, taken
from ._shares import Round


@dataclasses.dataclass(frozen=True)
class Route:
    """The way of the matrices of a stack `(N, m, n)`."""

    key: str  # of the stack
    mesh: Mesh
    axes: tuple[str, ...]
    spec: P  # in which they travel

    @classmethod
    def of(cls, key: str, stack: jax.Array, mesh: Mesh, axes: tuple[str, ...]) -> Route:
        """That of the matrices of `stack`: its own sharding, where that is known."""
        if not is_explicit(mesh):
            return cls(key, mesh, axes, even_spec(stack.shape, mesh, axes))
        sharding = explicit_sharding(stack)
        return cls(key, mesh, axes, P() if sharding is None else P(None, *sharding.spec[1:]))

    def to_owners(self, x: jax.Array) -> jax.Array:
        """An equal number of matrices for each device."""
        return put(put(x, self.mesh, self.spec), self.mesh, P(self.axes))

    def from_owners(self, x: jax.Array) -> jax.Array:
        """The inverse."""
        return put(x, self.mesh, self.spec)

    def dealt_out(self, x: jax.Array, r: Round) -> jax.Array:
        """The matrices of a round, `(devices, m, n)`; zeros for devices that get another kind."""
        x = put(x, self.mesh, self.spec)
        found = taken(x, r.entries(self.key, len(x)), self.mesh, self.spec)
        return put(found, self.mesh, P(self.axes))

    def back(self, x: jax.Array, r: Round) -> jax.Array:
        """The inverse: the matrices of a kind, in their order."""
        if any(self.spec):
            x = put(x, self.mesh, self.spec)
        return taken(x, r.owners(self.key), self.mesh, self.spec)
