"""Ranks that exceed what a matrix allows: recorded for summaries, or an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._keys import matrix_names
from .._recording import record
from .._side import Side
from ._bases import BasisFinder, Switched


class RankRecord(NamedTuple):
    """The rank of a stack of matrices, for `recording`."""

    shape: tuple[int, int]
    text: str


def record_rank(x: Any, asked: int, rank: int, side: Side, basis: BasisFinder) -> None:
    """Records the rank of matrices like `x`, and how many columns a switched basis keeps."""
    text = f"{_instead(rank, asked)} on the {side.value}"
    if isinstance(basis, Switched):
        stay = basis.stay(rank, side.order(x))
        text += f", leading {_instead(stay, basis.leading)}"
    record(RankRecord(tuple(x.shape[-2:]), f"rank {text}"))


def check_ranks(params: Any, asked: int, basis: BasisFinder, orders: Any) -> None:
    """Requires every matrix of `params` to allow the rank, and the `leading` of a switched basis.

    Raises:
      ValueError: naming the first parameter that does not allow them.
    """
    advice = "clamp_rank=True takes the nearest allowed value."
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
