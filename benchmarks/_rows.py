"""The registry of `tests/registry`, one row a method, for benchmarks and pages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from registry import (
    LEADERS,
    NAMED,
    REGISTRY,
    Row,
    by_family,
)

__all__ = ["LEADERS", "NAMED", "REGISTRY", "Row", "by_family"]
