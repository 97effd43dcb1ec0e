"""`python -m benchmarks evidence`: sweeps that go on where they were stopped, and equal budgets."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import curvax

ROOT = Path(__file__).parents[2]
METHODS = ("adamw", "swan", "muon", "galore")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.evidence.{name}")


def loss_at(suite: Any, method: str, values: dict[str, Any], seed: int) -> float | None:
    """A valley in every number, with noise; above some rate runs diverge."""
    if values["rate"] > 0.2:
        return None
    noise = random.Random(json.dumps([suite.name, method, values, seed])).random()
    distance = sum(abs(math.log2(values[k] / 0.005)) for k in ("rate", "adam_rate") if k in values)
    better = 0.3 * METHODS.index(method)
    return 1 + 50 / suite.steps + 0.2 * distance + 30 * values["decay"] + 0.01 * noise - better


class Known:
    """In the place of a runner: lines with known losses."""

    stop: int | None = None  # requests after which it is interrupted

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def line(self, request: Any, told: Any) -> dict[str, Any]:
        if self.stop is not None and len(self.requests) == self.stop:
            raise KeyboardInterrupt
        self.requests.append(request)
        return line_of(request)


def line_of(request: Any) -> dict[str, Any]:
    suite = module("_suites").SUITES[request.suite]
    loss = loss_at(suite, request.method, request.values, request.seed)
    final = request.seed != 0
    told = {"steps": [suite.steps // 2, suite.steps] if final else [suite.steps], "tested": {}}
    told |= {"losses": [loss] * len(told["steps"]), "cpu_seconds": [2.0] * len(told["steps"])}
    about = {"hardware": "a machine", "versions": {"jax": "0"}, "code": "c", "wall_seconds": 1.0}
    return {**request._asdict(), "loss": loss, "state_bytes": 1000, **told, **about}


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two of four methods, the second with a longer run; and a longer one of AdamW alone."""
    Suite, SUITES = module("_suites").Suite, module("_suites").SUITES
    share = {"make": None, "methods": METHODS, "seeds": (1, 2, 3), "ladder": "short"}
    first = Suite(name="first", budget=9, steps=100, **share)
    second = Suite(name="second", budget=4, steps=400, only=("rate",), after="first", **share)
    share["methods"] = ("adamw",)
    third = Suite(name="third", budget=4, steps=1600, only=("rate",), after="first", **share)
    monkeypatch.setattr(module("_sweep"), "Runner", Known)
    monkeypatch.setattr(Known, "stop", None)
    own = {suite.name: suite for suite in (first, second, third)}
    # `monkeypatch.delitem` would bring the others back in the reverse order.
    with mock.patch.dict(SUITES, own, clear=True):
        yield [first, second, third]


def swept(suites: list[Any], folder: Path) -> dict[str, Any]:
    with module("_lines").Lines(folder) as lines:
        module("_sweep").sweep(suites, lines)
        return lines.runs


def test_an_interrupted_sweep_ends_as_an_uninterrupted_one(
    suites: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = swept(suites, tmp_path / "whole")
    monkeypatch.setattr(Known, "stop", 17)
    starts = 0
    while True:
        starts += 1
        try:
            parts = swept(suites, tmp_path / "parts")
            break
        except KeyboardInterrupt:
            with (tmp_path / "parts" / "first.jsonl").open("a") as file:
                file.write('{"suite": "first", "method": "mu')  # as a crash leaves it
    assert starts == -(-len(whole) // 17)
    assert parts == whole == module("_lines").read(tmp_path / "parts")
    texts = [
        sorted(path.read_text() for path in (tmp_path / x).iterdir()) for x in ("whole", "parts")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 3
    assert len(whole) == sum(suite.runs for suite in suites)


def test_several_processes_make_the_runs_of_one(
    suites: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = module("_sweep")
    alone = swept(suites, tmp_path / "alone")
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda size, *_: ThreadPoolExecutor(size))
    running, most, lock, together = 0, 0, threading.Lock(), threading.Event()

    def line(request: Any) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                together.set()
        together.wait(1)
        with lock:
            running -= 1
        return line_of(module("_plan").Request(*request))

    monkeypatch.setattr(sweep, "_line", line)
    with module("_lines").Lines(tmp_path / "together") as lines:
        made = sweep.sweep(suites, lines, workers=3)
    assert made == len(alone)
    assert lines.runs == alone
    assert most == 3


def test_every_method_has_the_same_number_of_runs_at_any_moment(
    suites: list[Any], tmp_path: Path
) -> None:
    runs = list(swept(suites, tmp_path).values())
    for suite in suites:
        mine = [line for line in runs if line["suite"] == suite.name]
        tuned = Counter(line["method"] for line in mine if line["seed"] == 0)
        assert tuned == dict.fromkeys(suite.methods, suite.budget)
        for seed in suite.seeds:
            assert sorted(x["method"] for x in mine if x["seed"] == seed) == sorted(suite.methods)
    # AdamW first; the others in turns.
    order = [x["method"] for x in runs if x["suite"] == "first"][: 4 * 9]
    assert order[:9] == ["adamw"] * 9
    for length in range(10, 4 * 9):
        counts = Counter(order[9:length])
        assert max(counts.values()) - min(counts[name] for name in METHODS[1:]) <= 1


def test_the_rest_goes_to_adamw_at_its_own_best(suites: list[Any], tmp_path: Path) -> None:
    runs = swept(suites, tmp_path)
    best = {
        (suite.name, name): module("_plan").best_in(suite.name, name, runs)
        for suite in suites[:2]
        for name in METHODS
    }
    start = module("_plan").start_of
    for name in METHODS[1:]:
        point = start(suites[0], name, runs)
        assert {key: point[f"adam_{key}"] for key in ("rate", "b1", "b2", "decay")} == best[
            "first", "adamw"
        ]
        ratio = best["second", "adamw"]["rate"] / best["first", "adamw"]["rate"]
        after, before = start(suites[1], name, runs), best["first", name]
        assert after == {
            **before,
            "adam_rate": pytest.approx(before["adam_rate"] * ratio, rel=1e-3),
        }


def test_the_rest_follows_adamws_rate_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From suite to suite; how AdamW's rate for matrices changes says nothing of embeddings."""
    best = {
        ("recipe-250", "adamw"): {"rate": 0.002, "adam_rate": 0.004},
        ("recipe-250", "muon"): {"rate": 0.032, "adam_rate": 0.01},
        ("large-80", "adamw"): {"rate": 0.0001, "adam_rate": 0.008},
    }
    plan, suite = module("_plan"), module("_suites").SUITES["large-80"]
    monkeypatch.setattr(plan, "best_in", lambda suite, name, runs: best[suite, name])
    assert plan.start_of(suite, "muon", {}) == {"rate": 0.032, "adam_rate": 0.02}


@pytest.mark.parametrize("budget", [1, 6, 14, 40])
def test_the_descent_spends_its_budget_on_distinct_points(budget: int) -> None:
    tried, name_of = module("_descent").tried, module("_descent").name_of
    for method in module("_methods").ALL:
        start = method.start({"rate": 0.004, "b1": 0.9, "b2": 0.99, "decay": 0.0})
        known = {}

        def loss(point: Any, known: Any = known) -> float | None:
            return known.get(name_of(point))

        for _ in range(budget):
            _, point = tried(method.coordinates, start, loss, budget)
            assert name_of(point) not in known
            known[name_of(point)] = abs(math.log2(point["rate"] / 0.03)) + point["decay"]
        found, end = tried(method.coordinates, start, loss, budget)
        assert end is None and [name_of(point) for point, _ in found] == list(known)
        if budget == 40:  # it has found the minimum, which is on no ladder
            best = module("_descent").best_of(found)
            assert best["rate"] == pytest.approx(0.03, rel=0.2) and best["decay"] == 0.0
            assert module("_descent").bounded(found)


def test_a_point_with_nothing_to_vary_runs_once() -> None:
    tried = module("_descent").tried
    start = {"rate": 1e-3, "b1": 0.9}
    assert tried((), start, lambda point: None, 1) == ([], start)
    assert tried((), start, lambda point: 2.0, 1) == ([(start, 2.0)], None)


def test_a_scan_finds_the_valley_beyond_a_plateau() -> None:
    """At rates that are much too large the loss is flat, and a step up may seem to help."""
    _descent = module("_descent")

    def loss(point: Any) -> float:
        rate = point["rate"]
        plateau = 2.62 - 0.01 * (rate == 0.256)
        return min(plateau, 2.3 + 0.15 * abs(math.log2(rate / 0.016)))

    def best(scan: tuple[float, ...]) -> float:
        start = {"rate": 0.128}
        found, _ = _descent.tried([_descent.Coordinate("rate")], start, loss, 8, scan)
        return _descent.best_of(found)["rate"]

    assert best(()) == 0.256
    assert best(module("_suites").SCAN) == 0.016


def test_the_last_runs_are_for_the_rate_of_what_is_not_a_matrix() -> None:
    """Also of AdamW, whose point has this rate only then; the descent before is the same."""
    _descent, _methods = module("_descent"), module("_methods")

    def loss(point: Any) -> float:
        others = point.get("adam_rate", point["rate"])
        return abs(math.log2(point["rate"] / 0.004)) + abs(math.log2(others / 2.0))

    for name in ("adamw", "soap"):
        method = _methods.METHODS[name]
        start = method.start(None if name == "adamw" else _methods.METHODS["adamw"].start(None))
        before, _ = _descent.tried(method.coordinates, start, loss, 8)
        found, end = _descent.tried(method.coordinates, start, loss, 11, last=3)
        assert end is None and found[:8] == before and len(found) == 11
        best = _descent.best_of(before)
        tried = [point for point, _ in found[8:]]
        assert all(point == {**best, "adam_rate": point["adam_rate"]} for point in tried)
        rates = [point["adam_rate"] for point in tried]
        assert rates == sorted(rates) and _descent.best_of(found)["adam_rate"] == rates[-1]


def test_adamw_at_two_rates_is_adamw_at_one_if_they_agree() -> None:
    methods = module("_methods")
    tree = {"layer": {"kernel": (32, 48), "scale": (48,)}, "tokens": {"embedding": (9, 32)}}
    shapes = {"is_leaf": lambda x: isinstance(x, tuple)}
    params = jax.tree.map(lambda s: jax.random.normal(jax.random.key(1), s), tree, **shapes)
    schedule = module("_suites").SUITES["recipe-250"].schedule()
    values = methods.METHODS["adamw"].start(None)

    def moved(values: dict[str, float]) -> Any:
        optimizer = methods.optimizer("adamw", schedule, {}, values)
        state, at = optimizer.init(params), params
        for _ in range(3):
            updates, state = optimizer.update(params, state, at)
            at = jax.tree.map(jnp.add, at, updates)
        return at

    one, two = moved(values), moved({**values, "adam_rate": values["rate"]})
    for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    faster = moved({**values, "adam_rate": 2 * values["rate"]})
    np.testing.assert_array_equal(faster["layer"]["kernel"], two["layer"]["kernel"])
    for a, b in ((faster["tokens"]["embedding"], two["tokens"]["embedding"]),):
        assert np.abs(a - b).max() > 1e-3


def test_a_line_counts_once_and_a_wrong_one_is_named(suites: list[Any], tmp_path: Path) -> None:
    lines = module("_lines")
    request = module("_plan").Request("first", "muon", {"rate": 0.1, "decay": 0.0}, 1)
    line = line_of(request)
    path = tmp_path / "first.jsonl"
    path.write_text("".join(json.dumps(line | {"loss": loss}) + "\n" for loss in (1.0, 2.0)))
    with lines.Lines(tmp_path) as opened:
        opened.append(line | {"loss": 3.0})
        with pytest.raises(ValueError, match="another process writes"):
            lines.Lines(tmp_path)
    (found,) = lines.read(tmp_path).values()
    assert found["loss"] == 1.0 and path.read_text().count("\n") == 2
    path.write_text('{"suite": "first"}\n' + path.read_text())
    with pytest.raises(ValueError, match=r"first\.jsonl, line 1 is not a run"):
        lines.read(tmp_path)


def test_the_page_is_made_of_the_lines(
    suites: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = swept(suites, tmp_path)
    worst = next(x for x in runs.values() if x["method"] == "swan" and x["seed"] == 2)
    worst["loss"] = None  # one seed of SWAN's diverged: it stays, at the end of the table
    module("_pages").write(tmp_path, suites, runs)
    page = (tmp_path / "evidence.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    (table,) = (part for part in page.split("\n## ") if part.startswith("first: final"))
    rows = [x.strip("| ").split(" | ") for x in table.splitlines() if x.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["galore", "muon", "adamw", "swan"]
    assert rows[-1][1].startswith("inf") and rows[-1][2].startswith("+inf")

    finals = [x for x in runs.values() if x["suite"] == "first" and x["seed"]]
    losses = {name: [x["loss"] for x in finals if x["method"] == name] for name in METHODS}
    d = np.subtract(losses["muon"], losses["adamw"])
    interval = stats.ttest_rel(losses["muon"], losses["adamw"]).confidence_interval()
    muon = next(row for row in rows if row[0] == "muon")
    assert f"{np.mean(losses['muon']):.3f}" in muon[1]
    assert muon[2] == f"{d.mean():+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
    assert "below" in muon
    # Suites side by side: SWAN's lost seed shows, and AdamW alone has nothing to compare with.
    assert "| method | first | second |" in page and "| swan | **+inf** |" in page
    (ladder,) = (part for part in page.split("\n## ") if part.startswith("Sizes and lengths"))
    table = dict(x.strip("| ").split(" | ", 1) for x in ladder.splitlines() if x.startswith("| "))
    assert table["method"] == "first | second" and table["muon"] == f"{muon[5]} | > 4.00"
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")


def test_losses_of_different_tasks_are_no_curve(suites: list[Any], tmp_path: Path) -> None:
    runs = swept(suites, tmp_path)
    first, second, third = suites
    curve_of = module("_compare").curve_of
    curve = curve_of(first, runs)
    assert list(curve) == [100, 400, 1600] and curve_of(second, runs) == curve
    alone = [dataclasses.replace(suite, ladder=None) for suite in (first, second, third)]
    module("_suites").SUITES.update({suite.name: suite for suite in alone})
    assert all(curve_of(suite, runs) == {} for suite in alone)


def test_differences_corrections_and_speed_ups() -> None:
    compare = module("_compare")
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
    assert compare.speed_up(2.5, 100, curve, slower=4.0) == "0.50"
    assert compare.speed_up(1.0, 800, curve, slower=0.5) == "> 4.00"
    assert compare.speed_up(3.5, 100, curve) == "< 1.00"
    assert compare.speed_up(math.inf, 100, curve) == ""


def test_all_numbers_of_a_method_may_be_traced() -> None:
    """One program serves a whole line of a descent; whole numbers are part of it."""
    methods = module("_methods")
    tree = {"layer": {"kernel": (32, 48), "scale": (48,)}, "tokens": {"embedding": (9, 32)}}
    params = jax.tree.map(jnp.ones, tree, is_leaf=lambda x: isinstance(x, tuple))
    schedule = module("_suites").SUITES["recipe-250"].schedule()
    adamw = methods.METHODS["adamw"].start(None)
    for method in methods.ALL:
        static, values = methods.split(method.start(None if method.name == "adamw" else adamw))
        assert set(static) <= {"rank", "refresh", "everything"}, method.name
        assert {x.name for x in method.coordinates} <= static.keys() | values.keys()

        make = functools.partial(methods.optimizer, method.name, schedule, static)

        def step(values: Any, make: Any = make) -> Any:
            optimizer = make(values)
            return optimizer.update(params, optimizer.init(params), params)[0]

        updates = jax.eval_shape(step, {name: jnp.asarray(x) for name, x in values.items()})
        assert jax.tree.map(lambda x: x.shape, updates) == tree


def test_a_run_leaves_a_line_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = module("_texts").split(b"Words that repeat. " * 4000)
    monkeypatch.setattr(module("_texts"), "read", lambda name: text)
    suites, language = module("_suites"), module("_language").language
    make = functools.partial(language, "prose", batch=2, context=8, width=16, heads=2, depth=1)
    few = {"methods": ("adamw",), "seeds": (1,)}
    tiny = suites.Suite(name="tiny", make=make, budget=4, last=2, steps=3, **few)
    monkeypatch.setitem(suites.SUITES, "tiny", tiny)
    with jax.numpy_rank_promotion("allow"), module("_lines").Lines(tmp_path) as lines:
        assert module("_sweep").sweep([tiny], lines) == 5
        assert module("_sweep").sweep([tiny], lines) == 0
    *tuned, final = map(json.loads, (tmp_path / "tiny.jsonl").read_text().splitlines())
    assert [x["values"]["rate"] for x in tuned[:2]] == [0.008, 0.016]
    # AdamW at a second learning rate is another program, in the same process.
    assert ["adam_rate" in x["values"] for x in tuned] == [False, False, True, True]
    assert final["steps"] == [1, 2, 3] and final["losses"][-1] == final["loss"] > 0
    assert final["values"] == min(tuned, key=lambda x: x["loss"])["values"]
    assert final["state_bytes"] >= 8 * final["parameters"] and len(final["code"]) == 16


def test_adapters_start_at_the_model_and_extraction_ends_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = module("_texts").split(bytes(np.random.default_rng(0).integers(97, 107, 80_000)))
    monkeypatch.setattr(module("_texts"), "read", lambda name: text)
    with jax.numpy_rank_promotion("allow"):
        task = module("_language").language("code", 2, 2, 8, 16, 2, 1)
        lora = module("_adapters").with_adapters(task, 3)
        before, adapters = task.params(jax.random.key(0)), lora.params(jax.random.key(5))
        start = float(task.evaluate(before))
        assert float(lora.evaluate(adapters)) == start
        assert len(adapters) == 6 and all(x["lora_a"].shape[1] == 3 for x in adapters.values())
        # Six kernels change by rank 3, so extraction at rank 3 loses nothing, and at rank 1 a lot.
        moved = jax.tree.map(
            lambda x: x + 1.0 * jax.random.normal(jax.random.key(9), x.shape), adapters
        )
        changes = {k.replace(".", "/"): x["lora_a"] @ x["lora_b"] for k, x in moved.items()}
        after = module("_adapters").added(before, changes)
        losses = [
            float(task.evaluate(module("_finetune").extracted(before, after, rank)))
            for rank in (1, 3)
        ]
        end = float(lora.evaluate(moved))
    assert abs(end - start) > 0.01 and losses[1] == pytest.approx(end, abs=1e-4)
    assert abs(losses[0] - end) > 1e-3


def test_a_classifier_starts_at_chance_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = module("_texts").split(b"Words that repeat. " * 4000)
    monkeypatch.setattr(module("_texts"), "read", lambda name: text)
    shape = {"width": 16, "heads": 2, "depth": 1}
    with jax.numpy_rank_promotion("allow"):
        model = module("_language").language("prose", 1, 2, 64, **shape).params(jax.random.key(0))
        monkeypatch.setattr(module("_classify"), "base", lambda sizes, first: model)
        task = module("_classify").classify(100, batch=32, **shape)
        params, batches = task.params(jax.random.key(0)), task.batches(3)
        first = float(task.evaluate(params))
        assert first == pytest.approx(math.log(10))
        assert batches.max() < len(task.data[1]) == 1797 - 360
        optimizer = optax.adam(1e-2)
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, places: jax.Array) -> Any:
            grads = jax.grad(task.loss_of)(params, task.data, places)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for places in batches:
            params, state = step(params, state, places)
        assert task.evaluate(params) < first - 0.3
        assert task.test(params)["accuracy"] > 0.2
        with pytest.raises(ValueError, match="an image has 64 pixels, the model reads 32"):
            module("_classify").classify(1, context=32, **shape)


def test_texts_are_split_without_overlap() -> None:
    texts = module("_texts")
    text = bytes(itertools.islice(itertools.cycle(b"abcdefg\n"), 40 * texts.PIECE + 17))
    found = texts.split(text)
    assert len(found.train) == 36 * texts.PIECE and len(found.validation) == 4 * texts.PIECE
    assert texts.split(text).digest == found.digest != texts.split(text[::-1]).digest
    source = 'def f():\n    """Says it."""\n    return "kept"\n'
    strings = texts.docstrings_in(source)
    assert [x.value for x in strings] == ["Says it."]
    assert texts.without(source, strings) == 'def f():\n    return "kept"\n'


def test_a_text_is_known_from_counts_as_far_as_pairs_tell() -> None:
    texts = module("_texts")
    found = texts.split(b"abcdefg\n" * (5 * texts.PIECE))
    pairs = 36 * texts.PIECE / 8  # of each byte and the next one
    certain = math.log((pairs + texts.SYMBOLS) / (pairs + 1))
    assert texts.from_counts(found) == pytest.approx(certain, rel=1e-2)
    letters = np.random.default_rng(0).integers(97, 101, 40 * texts.PIECE, np.uint8)
    assert texts.from_counts(texts.split(bytes(letters))) == pytest.approx(math.log(4), abs=0.01)


RATES = re.compile(r"rates from ([\d.]+) to ([\d.]+) were best for language models of all sizes")


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_docstrings_tell_the_best_rates_of_all_sizes(name: str) -> None:
    """Of the language models from scratch in `train` and in the evidence."""
    results = ROOT / "benchmarks/results"
    tables = json.loads((results / "train.json").read_text())["tables"]
    found = [row["rate"] for row in tables[0]["rows"] if row["method"] == name]
    runs = module("_lines").read(results / "evidence")
    ladders = ("recipe", "small", "large", "code", "batch")
    for suite in module("_suites").SUITES.values():
        if suite.name.partition("-")[0] in ladders and name in suite.methods:
            found.append(module("_plan").best_in(suite.name, name, runs)["rate"])
    assert len(found) >= 10
    said = RATES.search(" ".join(getattr(curvax, name).__doc__.split()))
    assert said is not None
    expected = [min(found), max(found)]
    assert [float(x) for x in said.groups()] == pytest.approx(expected, rel=0.05)


START = re.compile(r"Start with (?:(?:([\d.]+) to )?([\d.]+) times )?a tuned AdamW's learning rate")


def test_docstrings_start_with_the_rates_that_were_found() -> None:
    """On the language models of `train` and of `recipe-250`, over AdamW's."""
    results = ROOT / "benchmarks/results"
    tables = json.loads((results / "train.json").read_text())["tables"]
    rows = {row["method"]: row["rate"] for row in tables[0]["rows"]}
    lines = (results / "evidence/recipe-250.jsonl").read_text().splitlines()
    runs = {module("_lines").key_of(line): line for line in map(json.loads, lines)}
    suite = module("_suites").SUITES["recipe-250"]
    best = {name: module("_plan").best_in(suite.name, name, runs) for name in suite.methods}
    for name in sorted({*suite.methods, "kl_shampoo"} - {"adamw"}):
        ratios = [rows[name] / rows["optax.adamw"]]
        if best.get(name):
            ratios.append(best[name]["rate"] / best["adamw"]["rate"])
        said = START.search(" ".join(getattr(curvax, name).__doc__.split()))
        assert said is not None, name
        most = float(said[2] or 1)
        assert (float(said[1] or most), most) == (min(ratios), max(ratios)), name
        if best.get(name):
            others = re.search(r"(\d+) times for `others`", getattr(curvax, name).__doc__ or "")
            ratio = best[name]["adam_rate"] / best["adamw"]["rate"]
            assert float(others[1] if others else 1) == 2 ** round(math.log2(ratio)), name
