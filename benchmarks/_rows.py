"""The registry of `tests/registry`, one row a method, for benchmarks and pages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from registry import LEADERS, NAMED, Row, by_family
from registry import METHODS as REGISTRY

__all__ = ["LEADERS", "NAMED", "REGISTRY", "Row", "by_family"]
