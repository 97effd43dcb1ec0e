"""The rooms of `transforms/`: each on its floor, each installed.

Decompositions are where their forms for TPUs are.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tests.sources import imported_names

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMS = ROOT / "transforms"
FLOORS = (
    {
        "_recording",
        "_paths",
        "_counts",
        "_validate",
        "_side",
    },
    {"_own_state", "_stacks", "_trees", "_spikes", "linalg"},
    {"refresh", "_guard", "storage", "directions", "distribute"},
    {"matrices", "kronecker"},
    {"subspace", "weights"},
    {"state"},
    {"layerwise"},
)
"""From the ground up: a room may import from lower floors and, without a circle, from its own."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in TRANSFORMS.rglob("*.py") if path.name != "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(TRANSFORMS).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports from, its own left out."""
    folders = path.relative_to(ROOT).parts[:-1]
    names = imported_names(path.read_text(), folders)
    return {name.split(".")[2] for name in names if name.startswith(".transforms.")} - {
        room_of(path)
    }


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in MODULES} == set(FLOOR)


def test_imports_run_downwards() -> None:
    upwards = [
        (path, room)
        for path in MODULES
        for room in imported_rooms(path)
        if FLOOR[room] > FLOOR[room_of(path)]
    ]
    assert not upwards


def test_rooms_of_one_floor_form_no_circle() -> None:
    reached = {room: set() for room in FLOOR}
    for path in MODULES:
        reached[room_of(path)] |= imported_rooms(path)
    order: list[str] = []
    while len(order) < len(FLOOR):
        free = [r for r in FLOOR if r not in order and reached[r] <= {*order}]
        assert free, {r: reached[r] - {*order} for r in FLOOR if r not in order}
        order += free


def test_every_room_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {p.parent.name for p in TRANSFORMS.glob("*/__init__.py")}
    assert {f"curvax.transforms.{room}" for room in rooms} < set(setuptools["packages"])


DECOMPOSITIONS = {
    *("cholesky", "eigh", "eigvalsh", "householder_product", "inv", "lstsq", "lu", "matrix_rank"),
    *("pinv", "polar", "qdwh", "qr", "schur", "slogdet", "solve", "svd", "triangular_solve"),
}


def decompositions(source: str) -> set[str]:
    """The decompositions of JAX that a module names: `….linalg.<name>`, but not of NumPy."""
    attributes = (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Attribute))
    named = {(ast.unparse(x.value), x.attr) for x in attributes}
    of_jax = {name for of, name in named if of.endswith("linalg") and of != "np.linalg"}
    return of_jax & DECOMPOSITIONS


def test_decompositions_are_where_their_forms_for_tpus_are() -> None:
    """Others use the functions of transforms/linalg."""
    for path in MODULES:
        source = path.read_text()
        assert re.search(r"import .*\bby_platform\b", source) or not decompositions(source), path


def test_only_linear_algebra_has_forms_by_platform() -> None:
    named = [
        p for p in MODULES if re.search(r"\b(by_platform|platform_dependent)\b", p.read_text())
    ]
    assert {room_of(path) for path in named} == {"linalg"}


def test_decompositions_are_recognized() -> None:
    assert decompositions("y = jnp.linalg.qr(x)[0] @ jax.scipy.linalg.polar(x)") == {"qr", "polar"}
    assert not decompositions("y = jnp.linalg.norm(x)")
