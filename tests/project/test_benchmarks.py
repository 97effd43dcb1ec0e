"""Figures on pages come from what the benchmarks say: their smallest runs, and their arithmetic."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from scipy import stats

import curvax
from tests.cases import every_method
from tests.helpers import ALL_CELLS
from tests.registry import Row

MODULES = {
    "train": "train",
    "step": "step_time",
    "overhead": "overhead",
    "compile": "compile_time",
    "memory": "memory",
    "layerwise": "layerwise_memory",
}
SMALLEST = {
    "train": "--only digits --methods dasgo --steps 4",
    "step": "--only gpt2 --methods muon,asgo --plain --width 8 --layers 1 --rounds 12",
    "overhead": "--methods racs --width 32 --depth 1 --context 8 --batch 2 --rounds 1",
    "compile": "--only leaves --methods racs --most 1 --repeats 1",
    "memory": "--methods racs --width 32 --layers 1",
    "layerwise": "--methods racs --sizes 60M",
}

pytestmark = pytest.mark.xdist_group("benchmarks")


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("suite", SMALLEST if ALL_CELLS else ("step",))
def test_a_suite_leaves_a_page_and_its_numbers(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests' programs stay
    argv = [*SMALLEST[suite].split(), "--preset", "cpu", "--seed", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [suite, *argv])
    monkeypatch.setattr(module("_tuning"), "RUNS", tmp_path / "runs")
    monkeypatch.setitem(module("_tasks").DIGITS, "batch", 8)
    monkeypatch.setattr(module("_tasks"), "IMAGES", 32)
    with jax.numpy_rank_promotion("allow"):  # the example's model promotes
        module(MODULES[suite]).main()
    page = tmp_path.joinpath(f"{suite}.md").read_text()
    record = json.loads(tmp_path.joinpath(f"{suite}.json").read_text())
    assert tmp_path.joinpath(f"{suite}.png").exists() == (suite == "layerwise")
    assert record["command"] in page and record["seed"] == 3
    for table in record["tables"]:
        assert table["rows"], table["title"]
        assert_printed(page, table)
    globals().get(f"check_{suite}", lambda tables: None)(record["tables"])


def assert_printed(page: str, table: dict[str, Any]) -> None:
    """The numbers of the JSON are those of the page, as far as it prints them."""
    section = page.split(f"## {table['title']}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    _, _, *cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    for texts, row in zip(cells, table["rows"], strict=True):
        for text, key in zip(texts, table["columns"], strict=True):
            value = row.get(key)
            if isinstance(value, str) or value is None:
                assert text == (value or "")
                continue
            decimals = len(text.partition(".")[2])
            assert abs(float(text.replace(",", "")) - value) <= 0.5001 * 10**-decimals, key


def check_overhead(tables: list[Any]) -> None:
    adamw, racs = tables[0]["rows"]
    assert adamw["over_adamw"] == 1 and racs["mean"] == racs["ms"] > 0


def check_step(tables: list[Any]) -> None:
    rows = {row["method"]: row for row in tables[0]["rows"]}
    assert rows["asgo"]["refreshes"] == 1 and rows["asgo"]["steps"] == 11
    assert rows["muon"]["refreshes"] is None and rows["muon"]["steps"] == 12
    muon = rows["muon"]
    assert muon["over_peer"] == pytest.approx(muon["p50"] / rows["optax.contrib.muon"]["p50"])
    assert muon["over_products"] == pytest.approx(muon["p50"] / muon["products"])


def check_train(tables: list[Any]) -> None:
    results, tuning = tables
    adamw, dasgo = sorted(results["rows"], key=lambda row: row["method"] == "dasgo")
    assert adamw["ms_over_adamw"] == 1 and adamw["steps"] <= 1 and adamw["beyond"] == ""
    assert adamw["tuning"].keys() == dasgo["tuning"].keys() == tuning["columns"].keys() - {"method"}
    assert dasgo["ms_over_adamw"] == pytest.approx(dasgo["ms"] / adamw["ms"])
    for row in results["rows"]:
        assert row["curve"]["steps"] == [1, 2, 3, 4]
        assert row["curve"]["min"][-1] == min(row["losses_by_seed"])


def check_memory(tables: list[Any]) -> None:
    for row in tables[0]["rows"]:
        assert 0 <= row["wide_bytes"] - row["wide_formula"] == row["wide_more"] < 100
    assert all(row["peak"] > row["state"] for row in tables[1]["rows"])


def check_layerwise(tables: list[Any]) -> None:
    (row,) = tables[0]["rows"]
    assert row["weights"] + row["state"] < row["layerwise"] < row["ordinary"]


@every_method
def test_a_method_has_the_state_of_its_formula_and_trains(row: Row) -> None:
    """As the step, memory and training benchmarks make it."""
    measured = module("_methods").METHODS[row.name]
    tree = {"layer": {"kernel": jax.ShapeDtypeStruct((24, 36), "float32")}}
    more = curvax.state_bytes(measured.make(10, 4), tree) - 4 * measured.numbers(24, 36, 4)
    eigenvalues = 4 * (24 + 36) if row.own_policy else 0
    assert 0 <= more - eigenvalues < 100
    trained = module("_optimizers").methods_for(SimpleNamespace(width=16, steps=20))[row.name]
    rates = {"weight_decay": 0.1, "adam_learning_rate": 0.1}
    assert curvax.state_bytes(trained.make(0.1, **rates, **trained.options), tree)


def test_periodic_work_counts_by_its_period() -> None:
    overhead = module("overhead")
    method = overhead.refreshed(lambda *args, **settings: None, 10, aim=1.1)
    row = overhead.row_of("galore", method, {("galore", 0): 20.0, ("galore", 1): 70.0}, 20.0)
    assert (row["mean"], row["over_adamw"]) == (25.0, 1.25) and "missed" in row["aim"]


def test_steps_to_a_loss() -> None:
    steps_to = module("_training").steps_to
    assert steps_to([10, 20, 30], [3.0, 2.0, 1.0], 1.5) == 25
    assert steps_to([10, 20, 30], [3.0, 1.0, 2.0], 2.0) == 15  # the first time counts
    assert steps_to([10, 20], [math.nan, 1.0], 1.5) == 20
    assert steps_to([10, 20], [3.0, 2.0], 1.5) == math.inf


def test_a_grid_grows_until_every_best_is_inside() -> None:
    grown, most = module("_tuning").grown, module("_tuning").MOST_RATES
    assert grown((1, 2, 4), [2]) == (1, 2, 4)
    assert grown((1, 2, 4), [1, 4]) == (0.5, 1, 2, 4, 8)
    grid: tuple[float, ...] = (1, 2, 4)
    for _ in range(20):
        grid = grown(grid, [grid[-1]])
    assert len(grid) == most


# Compiled programs.


@pytest.mark.weekly
def test_a_program_without_refreshes_decomposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = module("accelerators")

    class One(subject.Fused):
        def matrices(self) -> dict[str, tuple[int, int]]:
            return {"up": (self.width, self.inner)}

    shapes = One(8, 16, 1, 0)
    monkeypatch.setitem(subject.MODELS, "12", (shapes, jnp.float32))
    lines = {
        part: subject.measured(subject.Cell("cpu", "12", "unrolled", "no", "asgo", part))
        for part in subject.PARTS
    }
    assert lines["whole"]["loops"] >= lines["step"]["loops"] + 1
    entries = sum(m * n for m, n in shapes.matrices().values())
    assert lines["step"]["gradients"] == 4 * entries
    assert lines["step"]["least"] == 8 * entries + 2 * lines["step"]["state"]


def test_rounds_of_a_loop_and_their_bytes_are_counted() -> None:
    def program(rounds: Any) -> Any:
        def step(x: Any, count: Any) -> Any:
            bound = rounds(count + 1) if callable(rounds) else rounds
            return jax.lax.fori_loop(0, bound, lambda i, x: jnp.sin(x) @ x, x), count + 1

        shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        text = jax.jit(step).lower(*shapes).compile().as_text()
        return module("_programs").Program(text).step

    few, many = program(3), program(7)
    assert few.kinds["products"] == 3 and many.kinds["products"] == 7
    assert many.total - few.total == 4 * (few.total - program(2).total) > 0
    assert many.bytes - few.bytes >= 4 * 3 * 4 * 16 * 16  # two operands and a result
    # What the program decides: matrices at each step, and refreshes, which are due at others.
    assert program(lambda t: jnp.where(t > 0, 3, 0)).kinds["products"] == 3
    assert program(lambda t: jnp.where(t % 10 == 1, 3, 0)).kinds["products"] == 0


# The evidence.


def test_differences_corrections_and_speed_ups() -> None:
    compare = module("evidence._compare")
    a, b = [1.0, 1.2, 0.9, 1.1, 1.0], [1.1, 1.25, 1.05, 1.1, 1.2]
    found, right = compare.difference(a, b), stats.ttest_rel(a, b)
    assert (found.p, found.mean) == pytest.approx((right.pvalue, -0.1))
    assert (found.low, found.high) == pytest.approx(tuple(right.confidence_interval()))
    assert found.word == "below" and compare.difference(b, a).word == "above"
    assert compare.difference([1.0, 2.0], [2.0, 1.0]).word == "as AdamW"
    assert compare.holm({"x": 0.01, "y": 0.04, "z": 0.03}) == pytest.approx(
        {"x": 0.03, "y": 0.06, "z": 0.06}
    )
    curve = {100: 3.0, 400: 2.0, 1600: 1.5}
    assert compare.steps_for(2.5, curve) == (pytest.approx(200), "")
    assert compare.speed_up(2.5, 100, curve) == "2.00"
    assert compare.speed_up(1.0, 800, curve) == "> 2.00"
    assert compare.speed_up(3.5, 100, curve) == "< 1.00"


LOSSES = {
    "adamw": [2.0, 2.1, 1.9, 2.0, 2.05],
    "better": [1.8, 1.91, 1.69, 1.8, 1.86],
    "noisy": [1.5, 2.6, 2.0, 1.4, 2.5],
    "near": [1.995, 2.096, 1.894, 1.995, 2.046],  # below with every seed, by 0.005
    "worse": [2.3, 2.41, 2.19, 2.3, 2.36],
    "unfinished": [1.0, 1.0],
}


@pytest.mark.parametrize(
    ("method", "how", "expected"),
    [
        ("better", {}, "agrees"),
        ("worse", {}, "disagrees"),
        ("noisy", {}, "undecided: within the noise of seeds"),
        ("worse", {"behind": True}, "agrees"),
        ("near", {"level": True}, "agrees"),
        ("better", {"level": True}, "disagrees"),
        # 1.812 lies between 500 and 1000 steps of AdamW: 500 · 2^0.38 = 651, 2.6 times its own.
        ("better", {"steps": 2.0}, "agrees"),
        ("better", {"steps": 3.0}, "disagrees"),
        ("unfinished", {}, "open: not all runs are there"),
    ],
)
def test_verdicts_on_claims_follow_from_the_losses(
    monkeypatch: pytest.MonkeyPatch, method: str, how: dict[str, Any], expected: str
) -> None:
    claims, compare = module("evidence._claims"), module("evidence._compare")
    found = {
        name: compare.Result(None, [{"loss": x} for x in losses]) for name, losses in LOSSES.items()
    }
    monkeypatch.setattr(claims, "results", lambda suite, runs: found)
    monkeypatch.setattr(claims, "curve_of", lambda suite, runs: {250: 2.01, 500: 1.85, 1000: 1.75})
    claim = claims.Claim("c", "Table 1", ("recipe-250",), method, **how)
    assert claims.judged(claim, "recipe-250", {})[1] == expected


@pytest.mark.parametrize("budget", [6, 40])
def test_every_method_is_tuned_at_distinct_points_up_to_its_budget(budget: int) -> None:
    tried, name_of = module("evidence._descent").tried, module("evidence._descent").name_of
    for method in module("evidence._methods").ALL:
        start = method.start({"rate": 0.004, "b1": 0.9, "b2": 0.99, "decay": 0.0})
        known: dict[Any, float] = {}

        def loss(point: Any, known: Any = known) -> float | None:
            return known.get(name_of(point))

        for _ in range(budget):
            _, point = tried(method.coordinates, start, loss, budget)
            assert name_of(point) not in known
            known[name_of(point)] = abs(math.log2(point["rate"] / 0.03)) + point["decay"]
        found, end = tried(method.coordinates, start, loss, budget)
        assert end is None and len(found) == budget
        if budget == 40:  # it has found the minimum, which is on no ladder
            best = module("evidence._descent").best_of(found)
            assert best["rate"] == pytest.approx(0.03, rel=0.2) and best["decay"] == 0.0
