"""The modules of `examples/`, which are scripts that import each other, and no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    """The module, loaded once, under the name by which the scripts import it."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)
