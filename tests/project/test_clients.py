"""Each client has its parts, and what clients assert can fail. (CI runs the clients themselves.)"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "clients")
        yield importlib.import_module("_check")


def test_every_client_is_run_recorded_and_described() -> None:
    clients = {path.stem.removeprefix("train_") for path in ROOT.glob("clients/train_*.py")}
    script = (ROOT / "clients" / "run").read_text()
    assert set(re.findall(r"(?m)^  \[(\w+)\]=", script)) == clients
    (matrix,) = re.findall(
        r"client: \[(.*)\]", (ROOT / ".github/workflows/clients.yml").read_text()
    )
    assert set(matrix.split(", ")) == clients
    recorded = re.findall(r"(?m)^\| (\w+) \| \d", (ROOT / "clients" / "versions.md").read_text())
    assert set(recorded) == clients
    assert clients <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "clients.md").read_text()))
    tables = {path.stem.split("_")[0] for path in ROOT.glob("clients/expected/*.md")}
    assert tables == clients


def test_a_loss_that_stays_fails(checks: Any) -> None:
    checks.check_falls([2.0] * 5 + [1.0] * 5)
    with pytest.raises(AssertionError):
        checks.check_falls([2.0] * 10)


def test_a_restart_with_one_other_bit_fails(checks: Any) -> None:
    state = {"mu": np.ones(3, np.float32), "count": np.int32(4)}
    checks.check_equal(state, dict(state))
    others = (
        {**state, "mu": np.nextafter(state["mu"], np.float32(2))},
        {**state, "mu": np.ones(3)},
        {"mu": state["mu"]},
    )
    for other in others:
        with pytest.raises(AssertionError):
            checks.check_equal(state, other)
