"""The counters of each matrix in a batch, packed into one array.

Every array of a state costs the caller of a compiled step 10 to 20 µs (measured on a CPU): an array
per counter took several percent of a small model's update.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp


class _Array(NamedTuple):
    value: jax.Array  # int32 (..., number of names)


class Counts(_Array):
    """Subclasses list the names of their counters; a state holds them in its field `counts`."""

    __slots__ = ()
    names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def zeros(cls, batch: tuple[int, ...]) -> Any:
        """All counters at zero."""
        return cls(jnp.zeros((*batch, len(cls.names)), jnp.int32))

    def of(self, name: str) -> jax.Array:
        """One counter `(...)`."""
        return self.value[..., self.names.index(name)]

    def plus(self, **found: jax.typing.ArrayLike) -> Any:
        """The counters with numbers or booleans `(...)` added to the named ones."""
        batch = self.value.shape[:-1]
        each = [jnp.asarray(found.pop(name, 0), jnp.int32) for name in self.names]
        assert not found, found
        added = jnp.stack([jnp.broadcast_to(x, batch) for x in each], axis=-1)
        return self._replace(value=self.value + added)


def counter(name: str) -> Any:
    """A property that reads one counter, int32 `(...)`, from a state's `counts`."""
    return property(lambda state: state.counts.of(name))
