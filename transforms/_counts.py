"""Counters of every matrix of a batch, several in one array.

Whoever calls a compiled step pays for each array of the state, 10 to 20 µs as measured on a CPU:
with an array for each counter it was several per cent of an update of a small model.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp


class _Array(NamedTuple):
    value: jax.Array  # int32 (..., number of names)


class Counts(_Array):
    """Subclasses name their counters; a state has them as a field `counts`."""

    __slots__ = ()
    names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def zeros(cls, batch: tuple[int, ...]) -> Any:
        """None of anything."""
        return cls(jnp.zeros((*batch, len(cls.names)), jnp.int32))

    def of(self, name: str) -> jax.Array:
        """One counter `(...)`."""
        return self.value[..., self.names.index(name)]

    def plus(self, **found: jax.typing.ArrayLike) -> Any:
        """The counters after adding to some of them, numbers or booleans `(...)`."""
        batch = self.value.shape[:-1]
        each = [jnp.asarray(found.pop(name, 0), jnp.int32) for name in self.names]
        assert not found, found
        added = jnp.stack([jnp.broadcast_to(x, batch) for x in each], axis=-1)
        return self._replace(value=self.value + added)


def counter(name: str) -> Any:
    """A property of a state with `counts`: one of them, int32 `(...)`."""
    return property(lambda state: state.counts.of(name))
