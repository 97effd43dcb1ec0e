"""`python -m benchmarks`: every suite in its smallest form leaves what it promises."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import pytest
from registry import Row, every_method

import curvax

ROOT = Path(__file__).parents[2]
MODULES = {
    "train": "train",
    "step": "step_time",
    "width": "width",
    "overhead": "overhead",
    "compile": "compile_time",
    "memory": "memory",
    "bfloat16": "bfloat16",
    "layerwise": "layerwise_memory",
    "layerwise_run": "layerwise_run",
    "refresh": "refresh_time",
    "refreshes": "refresh_programs",
    "decompositions": "decompositions",
    "platforms": "platform_losses",
    "storage": "storage_time",
    "reading": "storage_reading",
    "lossless": "lossless",
    "scale": "scale",
}
SMALLEST = {
    "train": "--only digits --methods dasgo --steps 4",
    "step": "--only gpt2,unstacked --methods muon,asgo --plain --width 8 --layers 1 --rounds 12",
    "width": "--only llama --widths 12 --rounds 2",
    "overhead": "--methods racs --width 32 --depth 1 --context 8 --batch 2 --rounds 1",
    "compile": "--only leaves --methods racs --most 1 --repeats 1",
    "memory": "--methods racs --width 32 --layers 1",
    "bfloat16": "--methods AdamW --steps 2",
    "layerwise": "--methods racs --sizes 60M",
    "layerwise_run": "--only curve,time --curve-steps 12 --width 64 --tokens 16 --rounds 2",
    "refresh": "--only finders --order 8",
    "refreshes": "--methods asgo --orders 16",
    "decompositions": "--orders 8 --matrices 1 2 --rounds 1",
    "platforms": "--methods sumo --seeds 1,2",
    "storage": "--only bytes --order 64",
    "reading": "--only bases --orders 64 --rounds 1",
    "lossless": "--only digits --methods muon --seeds 1",
    "scale": "--only points,model --methods soap --devices 2 --width 8 --layers 1",
}

pytestmark = pytest.mark.xdist_group("benchmarks")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def test_the_command_lists_every_suite() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in module("__main__").SUITES:
        assert re.search(rf"^  {name} +\w.*[^ ]$", listing, re.MULTILINE), name
    wrong = subprocess.run([*command, "stpe"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "invalid choice" in wrong.stderr


@pytest.mark.parametrize("suite", SMALLEST)
def test_a_suite_leaves_a_table_its_numbers_and_a_figure(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if suite != "platforms":  # which traces anew; otherwise other tests' programs stay
        monkeypatch.setattr(jax, "clear_caches", lambda: None)
    argv = [*SMALLEST[suite].split(), "--preset", "cpu", "--seed", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [suite, *argv])
    subject = module(MODULES[suite])
    monkeypatch.setattr(module("_tuning"), "RUNS", tmp_path / "runs")
    if suite in ("train", "lossless"):  # on few images at a time
        monkeypatch.setitem(module("_tasks").DIGITS, "batch", 8)
        monkeypatch.setattr(module("_tasks"), "IMAGES", 32)
    if suite == "width":  # two methods with an aim, and the peers of all
        few = ("optax.adamw", "optax.contrib.muon", "muon", "asgo")
        monkeypatch.setattr(subject, "METHODS", {name: subject.METHODS[name] for name in few})
    if suite == "bfloat16":  # a small model, and two seeds
        small = {"batch": 2, "context": 8, "width": 32, "depth": 1}
        monkeypatch.setattr(subject, "SIZES", subject.SIZES | small)
        monkeypatch.setattr(subject, "SEEDS", 2)
        few = ("float32", "nearest", "stochastic")
        monkeypatch.setattr(subject, "ROUNDINGS", {name: subject.ROUNDINGS[name] for name in few})
    if suite == "lossless":
        monkeypatch.setitem(module("_tasks").DIGITS, "steps", 4)
        monkeypatch.setattr(subject, "MOMENTS", {"4 bits": subject.MOMENTS["4 bits"]})
    if suite == "platforms":  # in fewer steps rounding may not reach the loss
        small = {"batch": 2, "context": 8, "width": 32, "depth": 1}
        for name, value in small.items():
            monkeypatch.setitem(module("_tasks").LM, name, value)
    if suite == "scale":
        monkeypatch.setattr(subject, "LLAMA", {"7B": subject.LLAMA["7B"]})
    with jax.numpy_rank_promotion("allow"):  # the example's model promotes
        subject.main()
    page = tmp_path.joinpath(f"{suite}.md").read_text()
    record = json.loads(tmp_path.joinpath(f"{suite}.json").read_text())
    assert tmp_path.joinpath(f"{suite}.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == page.strip()
    assert record["command"] == f"python -m benchmarks {suite} {' '.join(argv)}"
    assert record["command"] in page and record["hardware"] in page
    assert record["seed"] == 3 and record["versions"]["jax"] == jax.__version__
    assert record["tables"]
    for table in record["tables"]:
        assert table["rows"], table["title"]
        assert_printed(page, table)
    globals().get(f"check_{suite}", lambda tables: None)(record["tables"])


def assert_printed(page: str, table: dict[str, Any]) -> None:
    """The numbers of the JSON are those of the page, as far as it prints them."""
    section = page.split(f"## {table['title']}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads, _, *cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    assert heads == [heading for heading, _ in table["columns"].values()]
    assert len(cells) == len(table["rows"])
    for texts, row in zip(cells, table["rows"], strict=True):
        for text, key in zip(texts, table["columns"], strict=True):
            value = row.get(key)
            if isinstance(value, str) or value is None:
                assert text == (value or "")
                continue
            decimals = len(text.partition(".")[2])
            assert abs(float(text.replace(",", "")) - value) <= 0.5001 * 10**-decimals, key


def check_bfloat16(tables: list[Any]) -> None:
    for table in tables:
        wide, nearest, stochastic = table["rows"]
        assert wide["bytes"] > stochastic["bytes"] > nearest["bytes"] > 6
    _, nearest, stochastic = tables[-1]["rows"]
    assert stochastic["still"] < nearest["still"], "at the smallest rate, in two steps"


def check_overhead(tables: list[Any]) -> None:
    adamw, racs = tables[0]["rows"]
    assert adamw["over_adamw"] == 1 and racs["mean"] == racs["ms"] > 0


def check_platforms(tables: list[Any]) -> None:
    plain, rounded, tpu = (row["by_seed"] for row in tables[0]["rows"])
    for form in (rounded, tpu):
        assert plain != form and plain == pytest.approx(form, rel=1e-3)


def test_periodic_work_counts_by_its_period() -> None:
    overhead = module("overhead")
    method = overhead.refreshed(lambda *args, **settings: None, 10, aim=1.1)
    row = overhead.row_of("galore", method, {("galore", 0): 20.0, ("galore", 1): 70.0}, 20.0)
    assert (row["mean"], row["over_adamw"]) == (25.0, 1.25) and "missed" in row["aim"]


def test_names_with_a_comma_can_be_chosen() -> None:
    names = tuple(module("overhead").methods_for(128))
    assert any("," in name for name in names)
    assert module("_record").names(names)(",".join(names)) == names


def check_lossless(tables: list[Any]) -> None:
    *_, adamw = tables[0]["rows"]
    plain, rounded, coded, half = rows = tables[0]["rows"][:-1]
    assert [row["form"] for row in (*rows, adamw)] == [
        *("float32", "float32, other rounding", "4 bits", "momentum in bfloat16", "float32")
    ]
    assert rounded["share"] == 1 and 0.45 < half["share"] < 0.6
    assert 0.12 < coded["share"] < 0.2 and coded["mean"] == pytest.approx(
        coded["by_seed"]["1"] - plain["by_seed"]["1"]
    )


def test_the_record_of_losses_goes_on_where_it_ends(tmp_path: Path) -> None:
    lossless = module("lossless")
    path = tmp_path / "lossless.jsonl"
    wanted = lossless.missing(("lm",), ("soap", "muon"), (1, 2), path)
    assert {program[:3] for program in wanted} >= {
        ("lm", "soap", "packed, 8 bits"),
        ("lm", "muon", "4 bits, dither"),
        ("lm", "optax.adamw", "float32"),
    }
    runs = [
        {"task": "lm", "method": "soap", "form": form, "seed": seed, "loss": loss}
        | {"state_bytes": size, "parameters": 10}
        for form, size, losses in (("float32", 80, (2.0, 2.1)), ("VQ", 20, (2.5, None)))
        for seed, loss in zip((1, 2), losses, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(run)}\n" for run in runs[:3]))
    left = lossless.missing(("lm",), ("soap", "muon"), (1, 2), path)
    assert ("lm", "soap", "VQ", [2]) in left and len(left) == len(wanted) - 1
    plain, coded = lossless.rows_of(runs)
    assert (plain["bytes"], coded["share"], coded["seeds"]) == (8, 0.25, 2)
    assert coded["beyond"] == "+0.500, +inf" and "above" in coded["aim"]


def check_step(tables: list[Any]) -> None:
    rows = {row["method"]: row for row in tables[0]["rows"]}
    assert set(rows) == {"optax.adamw", "optax.contrib.muon", "muon", "asgo"}
    assert rows["asgo"]["refreshes"] == 1 and rows["asgo"]["steps"] == 11
    assert rows["muon"]["refreshes"] is None and rows["muon"]["steps"] == 12
    muon = rows["muon"]
    assert muon["over_peer"] == pytest.approx(muon["p50"] / rows["optax.contrib.muon"]["p50"])
    assert muon["over_products"] == pytest.approx(muon["p50"] / muon["products"])
    assert ("missed" in muon["peer_aim"]) == (muon["over_peer"] > 0.5)
    both = tables[1]["rows"]
    assert [row["method"] for row in both] == ["muon", "asgo"]
    assert all(row["ratio"] == row["stacked"] / row["single"] > 0 for row in both)


def check_train(tables: list[Any]) -> None:
    results, tuning = tables
    adamw, dasgo = sorted(results["rows"], key=lambda row: row["method"] == "dasgo")
    assert adamw["ms_over_adamw"] == 1 and adamw["steps"] <= 1 and adamw["beyond"] == ""
    assert adamw["tuning"].keys() == dasgo["tuning"].keys() == tuning["columns"].keys() - {"method"}
    assert dasgo["ms_over_adamw"] == pytest.approx(dasgo["ms"] / adamw["ms"])
    for row in results["rows"]:
        curve = row["curve"]
        assert curve["steps"] == [1, 2, 3, 4] and curve["seconds"] == sorted(curve["seconds"])
        assert curve["min"][-1] == min(row["losses_by_seed"])
        assert 0 <= min(row["accuracy_by_seed"]) <= max(row["accuracy_by_seed"]) <= 100


def of_training(losses: list[float], ms: float) -> dict[str, Any]:
    curve = {"steps": [1, 2], "seconds": [ms, 2 * ms], "mean": losses[:2]}
    times = {
        "ms": ms,
        "compile_seconds": 5 * ms,
        "ms_over_adamw": 2.0,
        "seconds_by_seed": [ms, None],
    }
    return {"losses_by_seed": losses, "curve": curve, **times}


def test_methods_join_a_record_of_training_with_its_times() -> None:
    train = module("train")
    old = {
        "optax.adamw": of_training([1.0, 2.0], 10.0),
        "soap": of_training([0.5, 1.0], 30.0),
        "racs": of_training([0.7, 1.0], 15.0),
    }
    run = {"optax.adamw": of_training([1.0, 2.0], 20.0), "dion": of_training([0.8, 1.0], 40.0)}
    joined = train.added(old, run)
    assert list(joined) == ["optax.adamw", "racs", "soap", "dion"]  # as the families come
    assert {name: joined[name] for name in old} == old
    dion = joined["dion"]
    assert dion["ms"] == 20 and dion["seconds_by_seed"] == [20, None]
    assert dion["curve"]["seconds"] == [20, 40] and dion["curve"]["steps"] == [1, 2]
    run["optax.adamw"]["losses_by_seed"] = [1.0, 2.1]
    with pytest.raises(ValueError, match="trained again"):
        train.added(old, run)


def check_memory(tables: list[Any]) -> None:
    for row in tables[0]["rows"]:
        assert 0 <= row["wide_bytes"] - row["wide_formula"] == row["wide_more"] < 100
    assert all(row["peak"] > row["state"] for row in tables[1]["rows"])


def check_layerwise(tables: list[Any]) -> None:
    (row,) = tables[0]["rows"]
    assert row["weights"] + row["state"] < row["layerwise"] < row["ordinary"]


def check_layerwise_run(tables: list[Any]) -> None:
    curves, times = tables
    assert all(row["apart"] < 1e-3 for row in curves["rows"] if row["dtype"] == "float32")
    assert all(row["ordinary"] > 0 and row["layerwise"] > 0 for row in times["rows"])


def check_refreshes(tables: list[Any]) -> None:
    (row,) = tables[0]["rows"]
    assert row["seconds"] > 0 and row["cpu"] > 0 and row["traced"] > 0


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


def check_scale(tables: list[Any]) -> None:
    """The formulas are what was found, up to counters."""
    points, _, llama = tables
    for row in points["rows"]:
        assert 0 <= row["state"] - row["state_model"] < 64
        assert row["decompositions"] == row["decompositions_model"] > 0
        assert row["received"] == row["received_model"]
    for row in llama["rows"]:
        assert row["working"] == min(row["devices"], row["matrices"])


class Known:
    """In the place of a program: a loss that is least at a rate, and not finite far above it."""

    calls: ClassVar[list[tuple[float, ...]]] = []

    def __init__(self, make: Any, task: Any):
        self.best = make.func.__self__.options.get("best", 0.016)

    def state_bytes(self, values: Any) -> int:
        return 0

    def train(self, values: Any, seed: int, last: bool, watch: Any) -> Iterator[Any]:
        rate = values["rate"]
        self.calls.append((self.best, rate, values["adam_rate"], seed))
        loss = math.nan if rate > 10 * self.best else abs(math.log2(rate / self.best))
        run = module("_training").Run([], [], [], 0.0, {}, [], [])
        for step in range(2, 10, 2):
            if not last or step == 8:
                run.steps.append(step)
                run.losses.append(loss)
                run.seconds.append(1.0)
            yield run


def test_the_grid_grows_for_all_methods_until_every_best_is_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuning, training = module("_tuning"), module("_training")
    monkeypatch.setattr(tuning, "RUNS", tmp_path)
    monkeypatch.setattr(tuning, "Program", Known)
    monkeypatch.setattr(Known, "calls", [])
    task = SimpleNamespace(name="none", sizes={}, steps=8, eval_every=2)
    bests = (0.002, 0.064, 0.128)
    methods = [training.Method(print, {"best": best}) for best in bests]
    study = tuning.Study(task, methods, seed=5).run()
    assert study.grid == pytest.approx([1e-3 * 2**k for k in range(9)])
    for method, best in zip(methods, bests, strict=True):
        found = study.find(method)
        assert found.rate == best and found.interior and tuple(found.tuning) == study.grid
        assert all(value == math.inf for rate, value in found.tuning.items() if rate > 10 * best)
    # The same budget for all, nothing twice, and AdamW's best for what is not a matrix.
    number = len(study.grid) + len(study.seeds)
    assert len(Known.calls) == len(set(Known.calls)) == 4 * number
    assert {rest for best, _, rest, _ in Known.calls if best != 0.016} == {0.016}
    assert [seed for *_, seed in Known.calls][-12:] == [6] * 4 + [7] * 4 + [8] * 4
    # Another study finds all of it in the cache; of another task, nothing.
    again = tuning.Study(task, methods, seed=5).run()
    assert again.trained == 0 and again.grid == study.grid
    task.sizes["steps"] = 9
    assert tuning.Study(task, methods, seed=5).run().trained == 4 * number


def test_a_grid_has_an_end() -> None:
    grown, most = module("_tuning").grown, module("_tuning").MOST_RATES
    assert grown((1, 2, 4), [2]) == (1, 2, 4)
    assert grown((1, 2, 4), [1, 2]) == (0.5, 1, 2, 4)
    assert grown((1, 2, 4), [1, 4]) == (0.5, 1, 2, 4, 8)
    grid: tuple[float, ...] = (1, 2, 4)
    for _ in range(20):
        grid = grown(grid, [grid[-1]])
    assert len(grid) == most


def test_runs_are_kept_under_every_source_that_decides_them() -> None:
    known = {path.resolve() for path in module("_tuning").sources()}
    folders = [ROOT / name for name in ("curvax", "optimizers", "transforms")]
    assert known >= {path for folder in folders for path in folder.glob("*.py")}
    assert ROOT / "examples" / "train_lm.py" in known


def test_steps_to_a_loss() -> None:
    steps_to = module("_training").steps_to
    assert steps_to([10, 20, 30], [3.0, 2.0, 1.0], 1.5) == 25
    assert steps_to([10, 20, 30], [3.0, 1.0, 2.0], 2.0) == 15  # the first time counts
    assert steps_to([10, 20], [1.0, 2.0], 1.5) == 10
    assert steps_to([10, 20], [math.nan, 1.0], 1.5) == 20
    assert steps_to([10, 20], [3.0, 2.0], 1.5) == math.inf


def test_the_model_divides_as_the_library_does() -> None:
    """Numbers of matrices that nothing divides, on few devices and on more than there are."""
    from curvax.transforms.distribute._shares import share

    model, scale = module("_scale_model"), module("scale")
    shapes = {(8, 8): 13, (8, 24): 5, (16, 8): 3}
    for devices in (1, 2, 3, 7, 40):
        said = model.predict(scale.KINDS["soap"], shapes, devices, "float32")
        stacks = {str(i): (n, *shape) for i, (shape, n) in enumerate(shapes.items())}
        shares = share(stacks, devices)
        number = [sum(shares.each.values())] * devices
        for dealt in shares.rounds:
            for device, kind in enumerate(dealt.kind):
                number[device] += kind < len(dealt.kinds)
        assert said.decompositions == 2 * max(number)
        assert said.working == sum(n > 0 for n in number)
    assert model.blocks({(2048, 5461): 3}, 1024) == {(1024, 911): 36}


def test_papers_are_listed_and_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    papers = module("papers.__main__")
    monkeypatch.setattr(sys, "argv", ["papers"])
    papers.main()
    listing = capsys.readouterr().out
    assert all(f"  {name} " in listing for name in papers.scripts())
    full, small = papers.commands(["quantization", "alice_lm"], True, ["--seed", "1"])
    assert full[1:] == ["-m", "benchmarks.papers.quantization", "--full", "--seed", "1"]
    assert small[1:] == ["-m", "benchmarks.papers.alice_lm", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["papers", "table_9"])
    with pytest.raises(SystemExit):
        papers.main()
