"""Counters: of each matrix in a batch, packed into one array, and of steps.

Every array of a state costs the caller of a compiled step 10 to 20 µs (measured on a CPU): an array
per counter was several percent of a small model's update.

*Limits.* Counters are int32. Counters of matrices stay at their largest value, 2³¹ − 1. A step
count continues from 2³⁰ instead (`next_step`), because refreshes are due at multiples of it. A
negative number occurs only in a damaged checkpoint and counts as 0.
"""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

MAX_COUNT = jnp.iinfo(jnp.int32).max


class Counts(abc.ABC):
    """The methods of the classes of `counters`; a state holds one in its field `counts`."""

    names: ClassVar[tuple[str, ...]]  # of the counters
    value: jax.Array  # int32 (..., number of names)
    _replace: Any

    def __init__(self, value: Any):
        self.value = value

    @classmethod
    def zeros(cls, batch: tuple[int, ...]) -> Any:
        """All counters at zero."""
        return cls(jnp.zeros((*batch, len(cls.names)), jnp.int32))

    def of(self, name: str) -> jax.Array:
        """One counter `(...)`."""
        return self.value[..., self.names.index(name)]

    def plus(self, **increments: jax.typing.ArrayLike) -> Any:
        """Adds numbers or booleans `(...)` to the named counters."""
        batch = self.value.shape[:-1]
        each = [jnp.asarray(increments.pop(name, 0), jnp.int32) for name in self.names]
        assert not increments, increments
        added = jnp.stack([jnp.broadcast_to(x, batch) for x in each], axis=-1)
        value = jnp.maximum(self.value, 0)
        return self._replace(value=value + jnp.minimum(added, MAX_COUNT - value))

    def flags(self, damaged: jax.Array) -> dict[str, jax.Array]:
        """The numbers to add after a step that found these states damaged, bool `(...)`."""
        return {"restarted": damaged, "damaged": damaged.astype(jnp.int32) - self.of("damaged")}

    def restarted(self) -> Any:
        """The counters of matrices whose state starts anew: nothing was refreshed or seen yet."""
        # A rejection makes a root or subspace due at the next step, see `untried`.
        anew = {
            "refreshes": jnp.zeros_like,
            "seen": jnp.zeros_like,
            "rejected": lambda n: jnp.minimum(n, MAX_COUNT - 1) + 1,
        }
        each = [anew.get(name, lambda n: n)(self.of(name)) for name in self.names]
        return self._replace(value=jnp.stack(each, axis=-1))


def counters(named_tuple: type[Any]) -> type[Counts]:
    """Gives a `NamedTuple` with a field `value` and an attribute `names` `Counts`' methods."""
    # Their only base stays `tuple`, by which checkpointing libraries know a named tuple.
    for name in ("zeros", "of", "plus", "flags", "restarted"):
        setattr(named_tuple, name, vars(Counts)[name])
    Counts.register(named_tuple)
    return named_tuple


def counter(name: str) -> Any:
    """A property that reads one counter, int32 `(...)`, from a state's `counts`."""
    return property(lambda state: state.counts.of(name))


def at_step(value: Any, count: Any) -> Any:
    """A number, or that of a schedule at this step."""
    return value(count) if callable(value) else value


def next_step(count: jax.Array) -> jax.Array:
    """The step after step `count`, int32: `count + 1`, and 2³⁰ after 2³¹ − 1."""
    return jnp.where(count == MAX_COUNT, 2**30, jnp.maximum(count, 0) + 1)
