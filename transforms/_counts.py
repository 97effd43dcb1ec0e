"""Counters: of each matrix in a batch, packed into one array, and of steps.

Every array of a state costs the caller of a compiled step 10 to 20 µs (measured on a CPU): an array
per counter took several percent of a small model's update.

*Limits.* Counters are int32. Those of matrices stay at their largest value, 2³¹ − 1. A step count
continues from 2³⁰ instead (`next_step`), because refreshes are due at its multiples. A negative
number, which only a damaged checkpoint has, is taken as 0.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = jnp.iinfo(jnp.int32).max


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
        value = jnp.maximum(self.value, 0)
        return self._replace(value=value + jnp.minimum(added, LARGEST - value))

    def flags(self, damaged: jax.Array) -> dict[str, jax.Array]:
        """What to add after a step that found these states damaged, bool `(...)`."""
        return {"restarted": damaged, "damaged": damaged - self.of("damaged")}

    def restarted(self) -> Any:
        """The counters of matrices whose state starts anew.

        All go on, except that nothing has been refreshed or seen yet. A rejection makes a root or
        subspace due at the next step, see `untried`.
        """
        anew = {
            "refreshes": jnp.zeros_like,
            "seen": jnp.zeros_like,
            "rejected": lambda n: jnp.minimum(n, LARGEST - 1) + 1,
        }
        each = [anew.get(name, lambda n: n)(self.of(name)) for name in self.names]
        return self._replace(value=jnp.stack(each, axis=-1))


def counter(name: str) -> Any:
    """A property that reads one counter, int32 `(...)`, from a state's `counts`."""
    return property(lambda state: state.counts.of(name))


def next_step(count: jax.Array) -> jax.Array:
    """The step after step `count`, int32: `count + 1`, and 2³⁰ after 2³¹ − 1."""
    return jnp.where(count == LARGEST, 2**30, jnp.maximum(count, 0) + 1)
