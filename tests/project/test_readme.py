"""The code of the README and of docs/ runs as it stands: of docs/ two pages, weekly all of it.

Pages run as users run them: in a Python of their own, with XLA's optimizations. Blocks marked `py`
are parts of other code bases: they run beside stubs, and their calls of the library are made.
"""

import ast
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest

import curvax
from tests.cells import cells
from tests.shared.processes import ROOT, run_python

README = ROOT / "README.md"


def blocks_of(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if blocks_of(page)]


def summarized(page: Path) -> set[str]:
    """The rows of a table of `summarize` that a page shows."""
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"^\| parameter \| shape .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return {row for table in tables for row in table.splitlines() if not row.startswith("| … ")}


# The first block of the README is a step; its second an optimizer with an orthogonal direction.
README_ENDS = """
import numpy as np
assert step._cache_size() == 1
params = {"a": {"kernel": np.eye(3, dtype=np.float32) + 1}}
updates, _ = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(params)
norm = float(np.linalg.norm(updates["a"]["kernel"]))
assert abs(norm - 0.02 * 3**0.5) < 1e-6, norm  # an orthogonal 3×3 matrix has the norm √3
"""


@pytest.mark.parametrize("page", [README, *cells(PAGES, of=21)], ids=lambda page: page.stem)
def test_pages_run(page: Path) -> None:
    """And print the table that they show."""
    code = "".join(blocks_of(page)) + README_ENDS * (page == README)
    printed = run_python("-c", code, PYTHONPATH=os.environ.get("PYTHONPATH"))
    assert summarized(page) <= {*printed.splitlines()}


CLIENTS = re.findall(r"```py\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.DOTALL)


def calls_of(block: str) -> list[str]:
    """The outermost calls of the library in a block."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        code = ast.unparse(node)
        if isinstance(node, ast.Call) and re.match(r"curvax\.\w+\(", code):
            found.append(code)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(block))
    return found


def test_calls_in_blocks_for_other_code_bases_are_allowed() -> None:
    calls = [call for block in CLIENTS for call in calls_of(block)]
    assert len(calls) >= len(CLIENTS) - 1
    rate = optax.constant_schedule(0.03)
    names = {"curvax": curvax, "optax": optax, "schedule": rate, "learning_rate": 0.01}
    names |= {"config": SimpleNamespace(adam_weight_decay=0.1, adam_b1=0.9)}
    names |= {"rule": curvax.rules.maxtext, "rate": 3e-3, "decay": 0.1, "shardings": None}
    params = {"layer": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}}
    names |= {"c": SimpleNamespace(weight_decay=0.1), "params": params, "mesh": None}
    names |= {"nn": SimpleNamespace(get_sharding=lambda params, mesh: None)}
    for call in calls:
        optimizer = eval(call, names)
        state = jax.eval_shape(optimizer.init, params)
        updates, _ = jax.eval_shape(optimizer.update, params, state, params)
        assert updates["layer"]["kernel"].shape == (8, 16)


def test_every_combination_takes_steps() -> None:
    page, names = ROOT / "docs" / "combinations.md", {}
    kernel = {"kernel": jax.ShapeDtypeStruct((96, 128), "float32")}
    params = {"a": kernel, "attention": {"out": kernel}}  # the record's chain names the second
    where: dict[str, Any] = {}
    exec("".join(blocks_of(ROOT / "docs/where.md")), where)
    optimizers = [*where["optimizers"].values()]
    for line in re.split(r"(?m)^(?=optimizer = )", "".join(blocks_of(page))):
        exec(compile(line, str(page), "exec"), names)
        optimizers.append(names.pop("optimizer", None))
    for optimizer in cells(filter(None, optimizers), of=4):
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        assert updates["a"]["kernel"].shape == (96, 128)
        assert jax.tree.structure(after) == jax.tree.structure(state)
