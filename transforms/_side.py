"""The sides of a matrix, and the choices of `side=`.

The left side of a matrix `(m, n)` is its rows, the right side its columns. Factors, bases and Gram
matrices have order `m` on the left side and order `n` on the right side.

| choice | sides |
|---|---|
| "both" | left and right |
| "left", "right" | that side |
| "smaller", "larger" | the side of smaller or larger order; for a square matrix the left side |
| "std" | the side of smaller order; for a square matrix the right side, as in GaLore's code |
"""

from __future__ import annotations

import enum
from typing import Any

import jax


class Side(enum.Enum):
    """The rows or the columns of matrices `(..., m, n)`."""

    LEFT = "left"
    RIGHT = "right"

    axis: int  # of `(..., m, n)`, whose length is this side's order
    other_axis: int  # the same of the opposite side

    def __init__(self, name: str):
        self.axis, self.other_axis = (-2, -1) if name == "left" else (-1, -2)

    @property
    def other(self) -> Side:
        return Side.RIGHT if self is Side.LEFT else Side.LEFT

    def order(self, x: Any) -> int:
        """The order of this side's square matrices: `m` or `n`."""
        return x.shape[self.axis]

    def as_rows(self, x: jax.Array) -> jax.Array:
        """`x` with this side along the rows: `x` or its transpose. Applied twice, it gives `x`."""
        return x if self is Side.LEFT else x.mT

    def times(self, factor: jax.Array, x: jax.Array) -> jax.Array:
        """`factor x` or `x factor`: the product with a square matrix of this side."""
        return factor @ x if self is Side.LEFT else x @ factor


LEFT, RIGHT = Side


def sides_of(choice: str, x: Any, max_order: int | None = None) -> tuple[Side, ...]:
    """The sides of the table above for matrices `x (..., m, n)`, up to an order `max_order`."""
    if max_order is not None:
        sides = sides_of(choice, x)
        return tuple(side for side in sides if side.order(x) <= max_order)
    m, n = x.shape[-2:]
    if choice == "both":
        return (LEFT, RIGHT)
    if choice in ("left", "right"):
        return (Side(choice),)
    if m == n:
        return (RIGHT if choice == "std" else LEFT,)
    smaller = LEFT if m < n else RIGHT
    return (smaller.other if choice == "larger" else smaller,)


def side_of(choice: str, x: Any) -> Side:
    """The side that `choice` selects for matrices `x (..., m, n)`; "both" is not allowed."""
    (side,) = sides_of(choice, x)
    return side
