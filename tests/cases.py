"""Parameters of tests that run methods of the registry."""

from collections.abc import Iterable
from typing import Any

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


def in_turns_of(names: Iterable[str], start: int) -> list[Any]:
    """Parameters `row` and `name`: each name with one optimizer, another for each."""
    return [
        pytest.param(*row.values, name, id=f"{row.id}-{name}", marks=row.marks)
        for i, name in enumerate(names)
        for row in (ROWS if ALL_CELLS else [ROWS[(start + 5 * i) % len(ROWS)]])
    ]
