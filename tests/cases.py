"""Parameters of tests that run methods of the registry."""

from __future__ import annotations

import pytest

from .helpers import ALL_CELLS
from .registry import METHODS, REGISTRY

# A row's tests share compiled programs, so they run in one worker.
ROWS = [pytest.param(row, id=row.name, marks=pytest.mark.xdist_group(row.name)) for row in REGISTRY]
every_optimizer = pytest.mark.parametrize("row", ROWS)
every_method = pytest.mark.parametrize("row", ROWS[: len(METHODS)])


def in_turns(start: int, of: int = 3) -> pytest.MarkDecorator:
    """Parametrizes a test by every `of`-th optimizer, for behavior that all of them share.

    Tests with different `start` cover different optimizers, so each optimizer runs a share of them.
    With CURVAX_ALL_CELLS each optimizer runs all.
    """
    return pytest.mark.parametrize("row", ROWS if ALL_CELLS else ROWS[start::of])
