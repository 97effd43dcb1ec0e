"""Ranks that exceed what a matrix allows: recorded for summaries, or an error."""

from __future__ import annotations

from typing import Any

import jax

from .. import _recording
from .._keys import matrix_names
from .._recording import instead
from .._side import Side
from ._bases import BasisFinder, Switched


def record_rank(x: Any, asked: int, rank: int, side: Side, basis: BasisFinder) -> None:
    """Records the rank of matrices like `x`, and how many columns a switched basis keeps."""
    where = side.value
    if isinstance(basis, Switched):
        stay = basis.stay(rank, side.order(x))
        where += f", leading {instead(stay, basis.leading)}"
    _recording.record_rank(x, asked, rank, where)


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
