"""Figures on pages come from the benchmarks: their arithmetic."""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import curvax
from tests.cases import every_method
from tests.cells import cells
from tests.helpers import assert_close
from tests.registry import Row


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


@every_method
def test_a_method_has_the_state_of_its_formula(row: Row) -> None:
    """As the step benchmark and the pages make it."""
    measured = module("_methods").METHODS[row.name]
    tree = {"layer": {"kernel": jax.ShapeDtypeStruct((24, 36), "float32")}}
    more = curvax.state_bytes(measured.make(10, 4), tree) - 4 * measured.numbers(24, 36, 4)
    assert 0 <= more < 100


@pytest.mark.parametrize("moves", [False, True])
def test_rates_over_widths_are_found_and_the_first_ones_cost_what_they_cost(
    moves: bool, tmp_path: Any
) -> None:
    """On a loss that is a parabola in the logarithm of the rate, whose optimum may move."""
    subject = module("widths")
    arm, sizes = subject.ARMS[1], (64, 128, 256)
    path, runs = tmp_path / "widths.jsonl", {}
    while (cell := subject.upcoming(arm, sizes, runs)) is not None:
        optimum = arm.start * 8 * (64 / cell.width if moves else 1)
        runs[cell] = {"loss": 1 + math.log2(cell.rate / optimum) ** 2}
        module("_lines").append(path, cell._asdict() | runs[cell])
    row = subject.shown(path, sizes).splitlines()[-1].split(" | ")
    best = [arm.start * 8 / (2**i if moves else 1) for i in range(3)]
    assert row[2:] == [
        *(f"{rate:g}" for rate in best),
        "1.000",
        "+4.000 |" if moves else "+0.000 |",
    ]
    assert len(subject.losses(arm, 256, runs)) == (4 if moves else 3)  # no rate twice


M, N = 24, 40
LENGTHS = 8  # products with a vector: a rotation's length, and the defect, before it and at first


@pytest.mark.parametrize(
    ("method", "orders", "step", "products", "turns"),
    cells(
        [
            ("asgo", (M,), 6 * M * M * N, 6, 2 * M * M * N),
            ("soap", (M, N), 6 * M * N * (M + N), 6, 4 * M * N * (M + N)),
        ],
        of=2,
    ),
)
def test_a_program_with_rotations_decomposes_nothing_and_has_the_flops_of_its_formula(
    method: str, orders: tuple[int, ...], step: int, products: int, turns: int
) -> None:
    """Of a full optimizer, at the periods of its default."""
    subject = module("programs")
    refresh = turns + sum(2 * products * d**3 + 2 * LENGTHS * d**2 for d in orders)
    kernels = {"a": {"kernel": jax.ShapeDtypeStruct((M, N), jnp.float32)}}

    def facts(form: str, part: str) -> Any:
        call = f"curvax.{method}(rate, method={form!r})"
        return subject.facts("cpu", lambda: subject.optimizer(call, 4), kernels, part)

    found = {part: facts("rotations", part) for part in subject.PARTS}
    flops = {part: sum(line["flops"].values()) for part, line in found.items()}
    assert flops == {"step": step, "refresh": step + refresh}
    vectors = sum(found["refresh"]["more"]["flops"].values()) - sum(
        2 * products * d**3 for d in orders
    )
    assert 0 < vectors <= sum(2 * LENGTHS * d**2 for d in orders)
    assert all(line["decompositions"] == 0 for line in found.values())
    exact = facts("eigh", "refresh")
    assert exact["decompositions"] > 0 and exact["flops"] != found["refresh"]["flops"]


def test_the_model_of_time_finds_rates_from_which_times_were_made(monkeypatch: Any) -> None:
    subject, random = module("programs"), np.random.default_rng(0)
    rates = np.array([1 / 2e9, 4e-3, 1 / 50e9, 1 / 300e9])
    lines, times = {}, {}
    for name in ("a", "b", "c", "d", "e", "f"):
        scale = np.array([1e10, 300, 1e11, 1e12])
        own = dict(zip(subject.UNITS, map(int, scale * random.uniform(0.1, 1, 4)), strict=True))
        flops = {key: own.pop(key) for key in ("float32", "default")}
        cell = subject.Cell("h200", "gpt2", "unrolled", "", name, "measured")
        lines[cell] = own | {"flops": flops, "decompositions": 0}
        costs = subject.costs(lines[cell])
        times[name] = {"p50, ms": float(rates @ [costs[key] for key in subject.UNITS])}
    monkeypatch.setattr(subject, "recorded_table", lambda title: times)
    model = subject.fitted(lines)
    assert model.rates == pytest.approx(rates) and model.error < 1e-6
    # A product in bfloat16 takes half of the time, and three of them 1.5 of it.
    products = dict.fromkeys((*subject.UNITS, "bf16x3"), 0.0)
    assert model.ms(products | {"bf16x3": 2.0}) == pytest.approx(
        model.ms(products | {"default": 3.0})
    )


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


def calls_that_ran() -> set[str]:
    """Of those that pages print, as they are with the defaults of today."""
    calls, runs = module("evidence._calls"), module("pages").runs()
    pairs = [(suite, x.call) for suite in calls.PRINTED for x in calls.measured(suite)]
    return {call for suite, call in pairs if len(calls.result_of(suite, call, runs).finals) > 1}


SHAMPOO = "curvax.shampoo(rate, refresh=10, base=optax.adamw, others=optax.adamw(4 * rate))"
RACS = "curvax.racs(16 * rate, others=optax.adamw(4 * rate))"
ON_PAGES = {  # and one of the calls on each
    "README.md": "curvax.soap(0.01)",
    "docs/choosing.md": "curvax.soap(0.01)",
    "docs/start.md": RACS,
    "docs/clients.md": "curvax.muon(0.03)",
    "docs/tuning.md": RACS,
    "docs/methods.md": SHAMPOO,
    "docs/troubleshooting.md": "",
    "docs/faq.md": "",
    "docs/notebooks/transformer.py": "curvax.muon(0.03)",
    "docs/notebooks/sharding.py": "curvax.soap(0.01)",
    "docs/notebooks/fine_tuning.py": "",
}


@pytest.mark.parametrize(("page", "first"), ON_PAGES.items())
def test_calls_on_pages_are_those_that_ran(page: str, first: str) -> None:
    """As they stand, but for what belongs to the model and its run."""
    calls, pages = module("evidence._calls"), module("pages")
    printed = set(calls.calls_in((pages.ROOT / page).read_text(encoding="utf-8")))
    assert printed <= calls_that_ran() and {first} - {""} <= printed


def test_calls_with_other_defaults_have_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "curvax.soap(0.01)" in calls_that_ran()
    monkeypatch.setattr(curvax, "soap", functools.partial(curvax.soap, b1=0.5))
    assert "curvax.soap(0.01)" not in calls_that_ran()


@pytest.mark.parametrize(
    ("loss", "other", "takes_its_place"),
    [
        (1.6, None, False),  # 80 %, and no other has run
        (1.6, 1.55, True),
        (1.6, 1.59, False),
        (1.55, 1.5, False),
    ],
)
def test_where_a_call_keeps_too_little_another_takes_its_place(
    monkeypatch: Any, loss: float, other: float | None, takes_its_place: bool
) -> None:
    calls, Result = module("evidence._calls"), module("evidence._plan").Result
    losses = {"adamw": 2.0, "soap": 1.5, "muon": 1.5, "curvax.soap(0.01)": loss}
    losses |= {"curvax.soap(0.01, refresh=3)": other} if other else {}
    runs = {name: Result(None, [{"loss": x, "seed": 1}]) for name, x in losses.items()}
    none = Result(None, [])
    monkeypatch.setattr(calls, "results", lambda suite, _: runs)
    monkeypatch.setattr(calls, "result_of", lambda suite, call, _: runs.get(call, none))
    found = calls.alternatives("code-250", {})
    expected = {"curvax.soap(0.01)": "curvax.soap(0.01, refresh=3)"} if takes_its_place else {}
    assert {call: x.call for call, x in found.items()} == expected


def test_times_on_a_gpu_are_of_the_program_of_the_call(monkeypatch: Any) -> None:
    calls, pages = module("evidence._calls"), module("pages")
    cells = {"soap": "≈ 1.58", "muon": "1.08", "curvax.soap(rate, refresh=4)": "≈ 2"}
    found = {name: {"training step over AdamW's": cell} for name, cell in cells.items()}
    monkeypatch.setattr(pages, "default_calls", lambda: found)

    def column(call: str) -> str:
        return pages.on_gpu(calls.Printed("", call))

    assert column("curvax.muon(0.03)") == "1.08" and column("curvax.soap(0.01)") == "≈ 1.58"
    assert column("curvax.muon(rate, others=optax.adamw(4 * rate))") == "1.08"
    assert column("curvax.soap(0.01, refresh=3)") == ""
    assert column("curvax.soap(0.01, refresh=4, others=optax.adamw(rate))") == "≈ 2"


def test_pages_of_methods_start_with_the_calls_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages add weight decay. Where no call ran, they start with what the docstring advises."""
    calls, pages = module("evidence._calls"), module("pages")
    monkeypatch.syspath_prepend(pages.ROOT / "docs/site")
    start = importlib.import_module("methods").start
    for printed in calls.PRINTED["recipe-250"]:
        assert [*calls.calls_in(start(printed.method))] == [printed.call]
    assert "b1=0.8" in start("osgdm") and "graft=curvax.grafts.adam(0.8)" in start("foam")


def test_a_call_trains_as_the_same_numbers_do_in_the_tuning() -> None:
    """The schedule may come last; another rate is another optimizer."""
    methods = module("evidence._methods")
    params = {"up": {"kernel": jnp.ones((6, 4))}, "norm": {"scale": jnp.ones(4)}}
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)
    point = {"rate": 0.01, "decay": 0.001, "b1": 0.95, "b2": 0.95, "refresh": 3}
    point |= {"adam_rate": 0.02, "adam_b1": 0.9, "adam_b2": 0.999, "adam_decay": 0.001}

    def after(name: str, values: dict[str, Any]) -> Any:
        optimizer = methods.optimizer(name, 40, *methods.split(values))
        state, moved, update = optimizer.init(params), params, jax.jit(optimizer.update)
        for _ in range(4):
            updates, state = update(grads, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved

    call = "curvax.soap(0.01, weight_decay=decay, others=optax.adamw({} * rate, weight_decay=0))"
    tuned, same, other = (
        after("soap", point),
        *(after(call.format(times), {"rate": 0.01, "decay": 0.1}) for times in (2, 4)),
    )
    assert_close(same, tuned, 64)
    assert not jnp.allclose(other["norm"]["scale"], tuned["norm"]["scale"], atol=1e-3)


LOSSES = {
    "adamw": [2.0, 2.1, 1.9, 2.0, 2.05],
    "better": [1.8, 1.91, 1.69, 1.8, 1.86],
    "noisy": [1.5, 2.6, 2.0, 1.4, 2.5],
    "near": [1.995, 2.096, 1.894, 1.995, 2.046],  # below with every seed, by 0.005
    "worse": [2.3, 2.41, 2.19, 2.3, 2.36],
    "slight": [1.9, 2.05, 1.9, 1.94, 1.99],
    "unfinished": [1.0, 1.0],
}


VERDICTS: list[tuple[str, dict[str, Any], str]] = [
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
]


def test_verdicts_on_claims_follow_from_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a table with many comparisons they need smaller p-values."""
    compare, Result = module("evidence._compare"), module("evidence._plan").Result
    found = {name: Result(None, [{"loss": x} for x in losses]) for name, losses in LOSSES.items()}
    monkeypatch.setattr(compare, "results", lambda suite, runs: found)
    monkeypatch.setattr(compare, "curve_of", lambda suite, runs: {250: 2.01, 500: 1.85, 1000: 1.75})
    claim = functools.partial(compare.Claim, "c", ("recipe-250",))

    def verdict(*table: Any) -> str:
        """On the first claim of a table."""
        return compare.judged(table[0], "recipe-250", {}, compare.corrected(table, {}))[1]

    for method, how, expected in VERDICTS:
        assert verdict(claim(method, **how)) == expected, (method, how)
    slight, noise = claim("slight"), claim("noisy", others=("adamw", "better", "worse", "slight"))
    assert verdict(slight) == verdict(slight, slight) == "agrees"
    assert verdict(slight, noise) == "undecided: within the noise of seeds"


def test_every_method_is_tuned_to_the_minimum_within_its_budget() -> None:
    descent, budget = module("evidence._descent"), 40
    tried, name_of = descent.tried, descent.name_of
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
        best = descent.best_of(found)  # the minimum is on no ladder
        assert best["rate"] == pytest.approx(0.03, rel=0.2) and best["decay"] == 0.0
