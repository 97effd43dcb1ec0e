"""The modules of `examples/`, which are scripts that import each other, and no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
PARTS = {
    "low_memory": ("train_lm",),
    "train_lm": ("_runs",),
    "train_sharded": ("_runs", "train_lm"),
}


def example(name: str) -> Any:
    """The module, loaded once, under the name by which the scripts import it."""
    if name not in sys.modules:
        for part in PARTS.get(name, []):
            example(part)
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
