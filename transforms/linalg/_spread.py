"""Products of a matrix that several devices share.

XLA's partitioner divides a product among devices if its result is divided, or an argument along the
axis that is summed. So it computes the Gram matrix of a matrix that is cut along its longer side
from partial sums, and products with small square matrices piece by piece. Products of small square
matrices with each other would be computed on every device in full: `spread` cuts their results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

Cut = Callable[[jax.Array], jax.Array]

_CUT: ContextVar[Cut | None] = ContextVar("cut", default=None)


@contextlib.contextmanager
def spreading(cut: Cut) -> Iterator[None]:
    """Inside, devices share the matrices, and `cut` gives an array the sharding of its parts."""
    token = _CUT.set(cut)
    try:
        yield
    finally:
        _CUT.reset(token)


def is_shared() -> bool:
    """Whether devices share the matrices."""
    return _CUT.get() is not None


def spread(x: jax.Array) -> jax.Array:
    """`x`, computed in parts if devices share the matrices."""
    cut = _CUT.get()
    return x if cut is None else cut(x)


def traced_per_shape(*, static: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: a function is traced once for arrays of the same shapes and equal `static` ones.

    `jax.jit` alone would also keep what was traced for a matrix that devices share.
    """

    def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(f, static_argnames=static)

        @functools.wraps(f)
        def called(*args: Any, **settings: Any) -> Any:
            return f(*args, **settings) if is_shared() else jitted(*args, **settings)

        return called

    return decorated
