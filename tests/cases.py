"""Parameters of tests that run methods of the registry."""

import pytest

from .helpers import ALL_CELLS
from .registry import METHODS, REGISTRY

every_optimizer = pytest.mark.parametrize("row", REGISTRY)
every_method = pytest.mark.parametrize("row", METHODS)


def in_turns(start: int, of: int = 3) -> pytest.MarkDecorator:
    """As `cells(REGISTRY, of=of)`, which takes its place."""
    return pytest.mark.parametrize("row", REGISTRY if ALL_CELLS else REGISTRY[start::of])
