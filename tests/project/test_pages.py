"""The tables of the pages are those of the recorded results."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registry import LEADERS, Row, every_method

import curvax

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.pages")


def test_pages_have_the_tables_of_the_results(pages: Any) -> None:
    for path, text, wanted in pages.pages():
        assert text == wanted, f"{path.name}: run `python -m benchmarks pages`"
        assert pages.PLACE.search(text), f"{path.name} has no table"


def test_a_figure_changed_by_hand_is_found_and_written_again(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {name: (ROOT / name).read_text() for name in pages.PAGES}
    for name, text in right.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    place = pages.PLACE.search(right["docs/choosing.md"])
    digit = re.compile(r"\d").search(right["docs/choosing.md"], place.start(3))
    assert digit is not None
    changed = str(9 - int(digit[0]))
    text = right["docs/choosing.md"]
    wrong = text[: digit.start()] + changed + text[digit.end() :]
    tmp_path.joinpath("docs/choosing.md").write_text(wrong)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    with pytest.raises(SystemExit):
        pages.main()
    assert tmp_path.joinpath("docs/choosing.md").read_text() == wrong
    monkeypatch.setattr(sys, "argv", ["pages"])
    pages.main()
    assert {name: tmp_path.joinpath(name).read_text() for name in pages.PAGES} == right


@every_method
def test_every_method_is_in_the_tables(pages: Any, row: Row) -> None:
    """As its row says; what is not measured yet stays empty."""
    for name in ("formulas", "methods"):
        lines = [x for x in pages.TABLES[name]().splitlines() if x.startswith(f"| `{row.name}` |")]
        assert len(lines) == 1
        assert (row.readme.direction if name == "formulas" else row.mind) in lines[0]


@pytest.mark.parametrize("row", LEADERS)
def test_every_leader_is_trained_as_the_methods_are(pages: Any, row: Row) -> None:
    """On the same learning rates, with a best one inside; and stands on its page."""
    for title in pages.TRAINED:
        found = pages.results("train", title)
        assert found[row.name]["tuning"].keys() >= found["muon"]["tuning"].keys()
        rates = [*map(float, found[row.name]["tuning"])]
        assert min(rates) < found[row.name]["rate"] < max(rates)
    assert f"| `{row.name}` |" in pages.leaders()


def test_what_is_shown_is_what_is_trained_and_measured(pages: Any) -> None:
    methods, optimizers = (
        importlib.import_module(f"benchmarks.{name}") for name in ("_methods", "_optimizers")
    )
    leaders = {row.name for row in LEADERS}
    assert set(pages.SHOWN) | leaders == set(optimizers.NAMES) >= set(methods.FAMILIES)
    assert {method.measured for method in pages.SHOWN.values()} <= set(methods.METHODS)


@every_method
def test_the_formula_for_the_state_is_what_is_counted(row: Row) -> None:
    m, n, r = 7, 11, 3
    formula = row.readme.state.replace("none", "`0`").split("`")[1].replace("²", "**2")
    for before, after in (("mn", "m*n"), ("mr", "m*r"), ("nr", "n*r")):
        formula = formula.replace(before, after)
    formula = re.sub(r"(?<=\d)(?=[mnr])", "*", formula)
    found = row.numbers(row.size(m, n, r, {}))
    assert eval(formula, {"m": m, "n": n, "r": r}) == found, formula


def test_a_table_that_is_not_recorded_is_named(pages: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("train.json").write_text(json.dumps({"tables": []}))
    with pytest.raises(ValueError, match=r"train\.json has no table 'Handwritten digits'"):
        pages.results("train", "Handwritten digits", tmp_path)


def ranking(pages: Any, model: str) -> list[str]:
    """The optimizers by their loss in the records, the best first."""
    rows = pages.results("train", model)
    return sorted(rows, key=lambda name: float(rows[name]["loss"].split()[0]))


def test_the_advice_follows_the_records(pages: Any) -> None:
    """The best three on nanoGPT's recipe come first; what Muon does on convolutions is said."""
    (advice,) = re.findall(r"\*\*Which one\?\*\*.*?\n\n", (ROOT / "README.md").read_text(), re.S)
    digits = [name for name in ranking(pages, pages.TRAINED[1]) if name in pages.SHOWN]
    brief = [name for name in pages.finals(pages.RECIPE) if pages.SHOWN[name].brief]
    assert re.findall(r"`(\w+)`", advice)[:3] == brief[:3]
    assert {*digits[-2:]} == {"muon", "optax.contrib.muon"}
    assert pages.finals(pages.VISION)["muon"]["word"] == "below"
    assert "of two convolutional networks it gained on one and came last on the other" in " ".join(
        advice.split()
    )
    assert "ahead of AdamW on one and last on the other" in (curvax.muon.__doc__ or "")
