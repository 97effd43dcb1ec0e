"""The rank that a matrix allows: clamped and shown, or an error that names the parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._keys import matrix_names
from .._recording import record
from .._side import Side
from ._bases import BasisFinder, Switched


class RankRecord(NamedTuple):
    """What `recording` collects of a stack of matrices: their rank."""

    shape: tuple[int, int]
    text: str


def record_rank(x: Any, asked: int, rank: int, side: Side, basis: BasisFinder) -> None:
    """Tells `recording` the rank of matrices like `x`, and the columns that a switch keeps."""
    text = f"{_instead(rank, asked)} on the {side.value}"
    if isinstance(basis, Switched):
        stay = basis.stay(rank, side.order(x))
        text += f", leading {_instead(stay, basis.leading)}"
    record(RankRecord(tuple(x.shape[-2:]), f"rank {text}"))


def check_ranks(params: Any, asked: int, basis: BasisFinder, orders: Any) -> None:
    """Requires every matrix of `params` to allow the rank, and the columns that a switch keeps.

    Raises:
      ValueError: naming the first parameter that does not.
    """
    advice = "clamp_rank=True takes the nearest that there is."
    for names, x in zip(matrix_names(params), jax.tree.leaves(params), strict=True):
        rows, _, rank = orders(x)
        m, n = x.shape[-2:]
        where = f"for the parameter {names[0][0]!r}, whose matrices are {m}×{n}"
        if rank < asked:
            raise ValueError(f"rank must be at most {rank} {where}; got {asked}. {advice}")
        if isinstance(basis, Switched) and basis.stay(rank, rows) != basis.leading:
            raise ValueError(
                f"leading must be {basis.stay(rank, rows)} {where} and switched at rank {rank}; "
                f"got {basis.leading}. {advice}"
            )


def _instead(taken: int, asked: int) -> str:
    return f"{taken}" if taken == asked else f"{taken} instead of {asked}"
