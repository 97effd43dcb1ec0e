"""What the documentation site shows, as far as it can be told without building it.

CI builds it, strictly (.github/workflows/docs.yml).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import curvax

ROOT = Path(__file__).parents[2]
PARAMS = {"dense": {"kernel": jax.ShapeDtypeStruct((16, 32), "float32")}}
METHODS = sorted(x for x in curvax.__all__ if f"scale_by_{x}" in curvax.__all__)


@pytest.fixture
def site() -> Iterator[Any]:
    """The modules of the site that need nothing but the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        yield importlib.import_module


def pages_of_the_menu() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r": (\S+\.md)$", text, re.MULTILINE)


def test_the_menu_has_every_page_once(site: Any) -> None:
    written = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")]
    notebooks = [f"notebooks/{path.stem}.md" for path in ROOT.glob("docs/notebooks/*.py")]
    made = [*site("methods").pages(), *site("public_names").pages(), *notebooks]
    top = [path.name for path in ROOT.glob("*.md")]
    assert sorted(pages_of_the_menu()) == sorted([*written, *made, *top])


def test_every_public_name_has_its_place(site: Any) -> None:
    assert sorted(site("methods").NAMES) == METHODS
    missing = set(curvax.__all__) - site("public_names").names()
    assert not missing, "add them to a group of docs/site/public_names.py"


@pytest.mark.parametrize("method", METHODS)
def test_the_first_code_of_a_method_runs(site: Any, method: str) -> None:
    names: dict[str, Any] = {}
    exec(site("methods").start(method), names)
    state = jax.eval_shape(names["optimizer"].init, PARAMS)
    updates, _ = jax.eval_shape(names["optimizer"].update, PARAMS, state, PARAMS)
    assert updates["dense"]["kernel"].shape == (16, 32)


@pytest.mark.parametrize("method", METHODS)
def test_the_page_of_a_method_has_start_algorithm_and_record(site: Any, method: str) -> None:
    methods = site("methods")
    page = methods.pages()[f"methods/{method}.md"]
    places = [page.index(x) for x in ("## Start with", "!!! abstract", f"figures/{method}.svg")]
    assert places == sorted(places) and f"::: curvax.{method}\n" in page
    # A direction, and what it does to the weights, in the symbols of the docstring.
    steps = methods.steps_of(method)
    assert len(steps) >= 3 and any(x.startswith("W \\leftarrow W") for x in steps)
    assert any(x.startswith(("D", "M \\leftarrow")) for x in steps)
    assert all(x.count("{") == x.count("}") for x in steps)
    assert methods.record()["language model"][method]["curve"]["steps"]


def test_curves_of_methods_added_later_have_the_seconds_of_the_others(site: Any) -> None:
    """AdamW's step, times the ratio to an AdamW that ran at the same time."""
    methods = site("methods")
    rows = methods.record()["language model"]
    adamw, later = rows["optax.adamw"], rows["kl_shampoo"]
    last = methods._on_one_machine(later)["curve"]["seconds"][-1]
    wanted = later["ms_over_adamw"] * adamw["ms"] / 1000 * later["curve"]["steps"][-1]
    assert abs(last - wanted) < 1e-9


def test_pages_have_the_recorded_ratio_of_the_rates(site: Any) -> None:
    page = site("methods").pages()["methods/soap.md"]
    rows = site("methods").record()["language model"]
    ratio = rows["soap"]["rate"] / rows["optax.adamw"]["rate"]
    assert f"    {ratio:g} * rate," in page
    assert f"weight_decay=decay / {ratio:g}" in page


def test_docstrings_say_how_decay_and_rate_belong_together() -> None:
    for method in METHODS:
        text = " ".join((getattr(curvax, method).__doc__ or "").split())
        assert "multiplied by the learning rate" in text.split(" weight_decay: ")[1][:100], method
