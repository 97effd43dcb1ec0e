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


def test_every_method_is_on_the_page_that_decides(pages: Any) -> None:
    methods = importlib.import_module("benchmarks._methods")
    assert set(pages.LIMITS) >= {*methods.FAMILIES, "optax.adamw"}
    assert set(pages.BRIEF) <= set(pages.LIMITS)


def test_a_table_that_is_not_recorded_is_named(pages: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("train.json").write_text(json.dumps({"tables": []}))
    with pytest.raises(ValueError, match=r"train\.json has no table 'Handwritten digits'"):
        pages.results("train", "Handwritten digits", tmp_path)
