"""The sides of a matrix, and what `side=` chooses.

A matrix `(m, n)` has a left side, its rows, and a right side, its columns. Factors, bases and Gram
matrices of the left side have order `m`, those of the right side order `n`.

| choice | sides |
|---|---|
| "both" | left and right |
| "left", "right" | that one |
| "smaller", "larger" | the side of the smaller or larger order; of a square matrix, `square` |
| "std" | the side of the smaller order; of a square matrix the right one, as in GaLore's code |
"""

from __future__ import annotations

import enum
from typing import Any

import jax


class Side(enum.Enum):
    """The rows or the columns of matrices `(..., m, n)`."""

    LEFT = "left"
    RIGHT = "right"

    @property
    def axis(self) -> int:
        """The axis of `(..., m, n)` whose length is this side's order."""
        return -2 if self is Side.LEFT else -1

    @property
    def other(self) -> Side:
        """The opposite side."""
        return Side.RIGHT if self is Side.LEFT else Side.LEFT

    def order(self, x: Any) -> int:
        """The order of this side's square matrices: `m` or `n`."""
        return x.shape[self.axis]

    def as_rows(self, x: jax.Array) -> jax.Array:
        """`x` with this side along the rows: `x` itself or its transpose. It is its own inverse."""
        return x if self is Side.LEFT else x.mT


LEFT, RIGHT = Side


def sides_of(choice: str, x: Any, square: Side = LEFT) -> tuple[Side, ...]:
    """The sides that `side=choice` takes of matrices `x (..., m, n)`; see the module's table."""
    m, n = x.shape[-2:]
    if choice == "both":
        return (LEFT, RIGHT)
    if choice in ("left", "right"):
        return (Side(choice),)
    if m == n:
        return (RIGHT if choice == "std" else square,)
    smaller = LEFT if m < n else RIGHT
    return (smaller.other if choice == "larger" else smaller,)


def side_of(choice: str, x: Any) -> Side:
    """The only side that `choice`, which is not "both", takes of matrices `x (..., m, n)`."""
    (side,) = sides_of(choice, x)
    return side
