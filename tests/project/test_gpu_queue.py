"""The queue of `python -m benchmarks gpu`, in full at the size of a test, stopped once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import _lines, gpu
from benchmarks._gpu_page import write

pytestmark = [pytest.mark.weekly, pytest.mark.xdist_group("benchmarks")]
TINY = gpu.PRESETS["tiny"]


def test_a_queue_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks._pretraining.KEPT", tmp_path)
    path = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(gpu, "WARMING", 1e6)  # so that training does not fit
    gpu.run(path, TINY, minutes=5)
    assert "did not fit into 5 minutes: tiny adamw" in capsys.readouterr().out
    with path.open("a") as file:
        file.write('{"job": "torn')
    before = _lines.read(path)
    gpu.run(path, TINY, minutes=math.inf)
    lines = gpu.recorded(path)
    assert [*lines] == [job.name for job in gpu.plan(TINY, lines)]
    assert len(_lines.read(path)) == len(lines) and _lines.read(path)[:2] == before
    # A failure leaves its reason and costs no other.
    failed = [name for name, line in lines.items() if "error" in line]
    assert failed == ["nothing 1 × 1²"] and "KeyError" in lines[failed[0]]["error"]
    # Other seeds run at the best rate, which is not at an end of the grid.
    for method in TINY.trained["tiny"]:
        rates, rate = gpu.tuned(lines, "tiny", method)
        assert min(rates) < rate < max(rates) or len(rates) == gpu.MOST_RATES
        assert min(rates, key=lambda x: lines[f"tiny {method} {x:g} seed 0"]["loss"]) == rate
        best = lines[f"tiny {method} best seed 1"]
        assert best["rate"] == rate
        first = lines[f"tiny {method} {best['rate']:g} seed 0"]
        assert first["loss"] < math.log(64) and first["losses"][-1] == first["loss"] != best["loss"]
        assert first["tokens"] * first["steps"][-1] == 2 * 8 * 4
    write(path, lines)
    page = path.with_suffix(".md").read_text()
    assert f"{lines['tiny muon best seed 1']['loss']:.4f}" in page and "KeyError" in page
