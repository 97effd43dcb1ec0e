"""A method is added in five places of a copy of the tree, and the suites take it from there.

The method is `unit`: momentum, whose root mean square is 0.2 in every matrix.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.shared.processes import ROOT, run_python

FOLDERS = ("curvax", "optimizers", "transforms", "tests", "benchmarks", "docs", "examples")

REFERENCE = '''
"""Momentum of constant length, transcribed in NumPy float64.

Readings chosen:
- A momentum of zero stays zero.
"""

import numpy as np


def unit(gradients, *, b1=0.9, rms=0.2):
    """M ← b1 M + (1 - b1) G; the direction is M over its root mean square."""
    M, directions = np.zeros_like(gradients[0]), []
    for G in gradients:
        M = b1 * M + (1 - b1) * G
        length = np.sqrt(np.mean(M**2))
        directions.append(rms * M / length if length else M)
    return directions, [{} for _ in gradients]
'''

RECIPE = '''
r"""Unit: momentum of constant length."""

from __future__ import annotations

from typing import Any

import optax

from ..transforms.directions._momentum import momentum
from ..transforms.directions._normalize import normalize_matrices
from ..transforms.matrices._matrix_rule import Matrices
from ..transforms.state._inject import scheduled
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_unit(*, b1: Decay = 0.9) -> optax.GradientTransformation:
    """The direction of `unit` on batches of matrices `(..., m, n)`."""
    return optax.chain(momentum(b1), normalize_matrices(0.2))


def unit(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Decay = 0.9,
    matrices: Matrices = None,
    weight_dimension_numbers: Any = None,
    mesh: MeshLike = None,
    mesh_axis: MeshAxis = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    weights: str | Weights | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Unit: momentum of constant length.

    .. math::
      M \\leftarrow b_1 M + (1 - b_1) G, \\quad D = 0.2\\, M / \\mathrm{rms}(M)

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the momentum.
      matrices, weight_dimension_numbers, mesh, mesh_axis, weight_decay, weight_decay_mask, weights,
        adam_learning_rate, others: see `muon`.
    """
    return assemble(
        scale_by_unit(b1=b1),
        learning_rate,
        matrices=matrices,
        weight_dimension_numbers=weight_dimension_numbers,
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
'''

ROW = """
from ..reference.unit import unit  # noqa: E402

UNIT = Row(
    name="unit",
    family="orthogonalized",
    reference=unit,
    fields=frozenset({"mu"}),
    narrow=True,
    growth=64.0,
    longest=lambda at: 0.2 * (at.m * at.n) ** 0.5,
    numbers=lambda s: s.m * s.n,
)
"""

LINE = "| `unit` | `0.2 M / rms(M)` | `mn` | `6mn` |  | none | an example |\n"

SITE = """
import sys
sys.path.insert(0, "docs/site")
import methods, public_names
from benchmarks import pages
from benchmarks._methods import METHODS, NAMES
assert {"Unit": "methods/unit.md"} in methods.menu()[0]["Orthogonalized"]
page = methods.pages()["methods/unit.md"]
assert "| `unit` | 4.00 |" in pages.methods() and not [*pages.wrong_formulas()]
assert "0.2 M / rms(M)" in page and "stays zero" in page and "Start with" not in page
assert not public_names.missing()
assert "unit" in NAMES and METHODS["unit"].numbers(4, 6, 2) == 24
"""


def added(path: Path, text: str, before: str = "") -> None:
    """Writes text before a line of a file, or at its end, where it may make the file."""
    old = path.read_text() if path.exists() else ""
    assert before in old, (path, before)
    path.write_text(old.replace(before, text + before, 1) if before else old + text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the method."""
    tree = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.png")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tree)
    added(tree / "tests/reference/unit.py", REFERENCE)
    added(tree / "optimizers/_unit.py", RECIPE)
    for where in ("optimizers/__init__.py", "curvax/__init__.py"):
        source = "._unit" if where.startswith("optimizers") else ".optimizers"
        added(tree / where, f"from {source} import scale_by_unit, unit\n", "\n__all__ = [")
        added(tree / where, '\n    "scale_by_unit",\n    "unit",', "\n]")
    added(tree / "tests/registry/_methods.py", ROW, "METHODS = tuple(")
    added(tree / "docs/methods.md", LINE, "\n<!-- end of table -->")
    return tree


def test_the_suites_find_the_method(copy: Path) -> None:
    """It follows its reference and keeps the core of the contract, and its names are compared."""
    files = ("test_references.py", "test_contract.py", "test_arguments.py")
    given = [*(f"tests/optimizers/{file}" for file in files), "tests/project/test_house.py"]
    chosen = "unit or names_written_out or another_format"
    given += ["--numprocesses=0", "-k", chosen]
    said = run_python("-m", "pytest", "-v", *given, cwd=copy, PYTHONPATH=str(copy))
    for test in ("follow_the_reference_of_their_row", "second_call", "shared_arguments"):
        assert re.search(rf"{test}.*\[unit\] PASSED", said), said


def test_pages_and_benchmarks_have_the_method(copy: Path) -> None:
    run_python("-c", SITE, cwd=copy, PYTHONPATH=str(copy))
