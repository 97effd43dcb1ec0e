"""The code of the README and of docs/ runs as it stands: of docs/ a third, weekly all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import share
from tests.registry import METHODS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def blocks_of(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(page: Path) -> dict[str, Any]:
    """What the blocks define, run one after the other."""
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", share(PAGES[1:], of=12), ids=lambda page: page.stem)
def test_pages_run(page: Path) -> None:
    with jax.numpy_rank_promotion("allow"):  # as users have it
        run(page)


def test_every_combination_takes_steps() -> None:
    page, names = ROOT / "docs" / "combinations.md", {}
    params = {"a": {"kernel": jax.ShapeDtypeStruct((96, 128), "float32")}}
    for line in re.split(r"(?m)^(?=optimizer = )", "".join(blocks_of(page))):
        exec(compile(line, str(page), "exec"), names)
        if optimizer := names.pop("optimizer", None):
            state = jax.eval_shape(optimizer.init, params)
            updates, after = jax.eval_shape(optimizer.update, params, state, params)
            assert updates["a"]["kernel"].shape == (96, 128)
            assert jax.tree.structure(after) == jax.tree.structure(state)


def test_the_readme_compiles_one_step_and_orthogonalizes() -> None:
    """Its first block is a step; its second an optimizer with an orthogonal direction."""
    names = run(PAGES[0])
    assert names["step"]._cache_size() == 1
    params, optimizer = {"a": {"kernel": np.eye(3, dtype=np.float32) + 1}}, names["optimizer"]
    updates, _ = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(params)
    norm = float(np.linalg.norm(updates["a"]["kernel"]))
    assert abs(norm - 0.02 * 3**0.5) < 1e-6  # an orthogonal 3×3 matrix has the norm √3


def test_a_method_starts_with_one_learning_rate() -> None:
    """Those of the docstrings are those of the table, which the page of each method reads too."""
    text = (ROOT / "docs/start.md").read_text().split("<!-- table: rates -->")[1]
    starts = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert {*starts} == {row.name for row in METHODS}
    for name, rate in starts.items():
        number, *multiple = rate.split(" × ")
        times = "" if number == "1" else f"{number} times "
        said = (
            f"{times}a tuned AdamW's learning rate" if multiple else f"a learning rate of {number}"
        )
        assert f"Start with {said}" in " ".join((getattr(curvax, name).__doc__ or "").split()), name
