"""What benchmarks and pages share with the tests: the registry, one row a method, and platforms."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from registry import LEADERS, NAMED, Row, by_family
from registry import METHODS as REGISTRY
from tpu_forms import forms_of_tpus

__all__ = ["LEADERS", "NAMED", "REGISTRY", "Row", "by_family", "forms_of_tpus"]
