"""Parameters of tests that run methods of the registry."""

import pytest

from .registry import METHODS, REGISTRY

every_optimizer = pytest.mark.parametrize("row", REGISTRY)
every_method = pytest.mark.parametrize("row", METHODS)
