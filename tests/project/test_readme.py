"""The code of the README and of docs/ runs as it stands: of docs/ two pages, weekly all of it."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import share

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks_of(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(page: Path) -> dict[str, Any]:
    """What the blocks define, run one after the other."""
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        exec(compile(block, str(page), "exec"), names)
    return names


PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if blocks_of(page)]


@pytest.mark.parametrize("page", share(PAGES, of=15), ids=lambda page: page.stem)
def test_pages_run(page: Path) -> None:
    with jax.numpy_rank_promotion("allow"):  # as users have it
        run(page)


def test_every_combination_takes_steps() -> None:
    page, names = ROOT / "docs" / "combinations.md", {}
    params = {"a": {"kernel": jax.ShapeDtypeStruct((96, 128), "float32")}}
    optimizers = [*run(ROOT / "docs/where.md")["optimizers"].values()]
    for line in re.split(r"(?m)^(?=optimizer = )", "".join(blocks_of(page))):
        exec(compile(line, str(page), "exec"), names)
        optimizers.append(names.pop("optimizer", None))
    for optimizer in share(filter(None, optimizers), of=2):
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        assert updates["a"]["kernel"].shape == (96, 128)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_the_readme_compiles_one_step_and_orthogonalizes() -> None:
    """Its first block is a step; its second an optimizer with an orthogonal direction."""
    names = run(README)
    assert names["step"]._cache_size() == 1
    params, optimizer = {"a": {"kernel": np.eye(3, dtype=np.float32) + 1}}, names["optimizer"]
    updates, _ = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(params)
    norm = float(np.linalg.norm(updates["a"]["kernel"]))
    assert abs(norm - 0.02 * 3**0.5) < 1e-6  # an orthogonal 3×3 matrix has the norm √3
