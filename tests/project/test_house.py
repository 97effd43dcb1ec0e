"""Rules for the source: floors of rooms, imports, where numerics are, lengths of files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import curvax
from curvax import optimizers
from tests.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMS = ROOT / "transforms"
FLOORS = (
    {"_arrays", "_recording", "_paths", "_counts", "_validate", "_side", "_keywords"},
    {"_own_state", "_stacks", "_trees", "_spikes", "_carry", "linalg"},
    {"refresh", "_guard", "storage", "directions", "distribute"},
    {"matrices", "kronecker"},
    {"subspace", "weights"},
    {"state"},
    {"layerwise"},
)
"""From the ground up: a room may import from lower floors and, without a circle, from its own."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in TRANSFORMS.rglob("*.py") if path.name != "__init__.py")
OPTIMIZERS = sorted((ROOT / "optimizers").rglob("*.py"))
LIBRARY = [*(ROOT / "curvax").glob("*.py"), *OPTIMIZERS, *TRANSFORMS.rglob("*.py")]


def imported_names(source: str, folders: tuple[str, ...] = ()) -> Iterator[str]:
    """What a module in `folders` imports; a relative name becomes one like `.transforms._a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ("", *folders[: len(folders) + 1 - node.level]) if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def folders_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts[:-1]


def room_of(path: Path) -> str:
    return path.relative_to(TRANSFORMS).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports from, its own left out."""
    names = imported_names(path.read_text(), folders_of(path))
    rooms = {name.split(".")[2] for name in names if name.startswith(".transforms.")}
    return rooms - {room_of(path)}


def test_imports_run_downwards() -> None:
    for path in MODULES:
        for room in imported_rooms(path):
            assert FLOOR[room] <= FLOOR[room_of(path)], (path, room)


def test_rooms_of_one_floor_form_no_circle() -> None:
    reached = {room: set() for room in FLOOR}
    for path in MODULES:
        reached[room_of(path)] |= imported_rooms(path)
    order: list[str] = []
    while len(order) < len(FLOOR):
        free = [r for r in FLOOR if r not in order and reached[r] <= {*order}]
        assert free, {r: reached[r] - {*order} for r in FLOOR if r not in order}
        order += free


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
    """Others use the functions of transforms/linalg, which alone has forms by platform."""
    for path in MODULES:
        source = path.read_text()
        assert re.search(r"import .*\bby_platform\b", source) or not decompositions(source), path
        if re.search(r"\b(by_platform|platform_dependent)\b", source):
            assert room_of(path) == "linalg", path


def is_within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def forbidden_imports(source: str, folders: tuple[str, ...]) -> list[str]:
    """Imports of the library by absolute names, and of the facade from the folders behind it."""
    return [
        name
        for name in imported_names(source, folders)
        if is_within(name, "curvax", "optimizers", "transforms")
        or (folders and name[0] == "." and not is_within(name, ".optimizers", ".transforms"))
    ]


def numerics(source: str) -> list[str]:
    """The uses of array functions in `source`."""
    arrays = ("jax.lax", "jax.numpy", "jax.scipy", "jnp", "numpy")
    used = list(imported_names(source))
    nodes = ast.walk(ast.parse(source))
    used += [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    return [name for name in used if is_within(name, *arrays)]


def test_the_library_imports_itself_relatively_and_never_the_facade() -> None:
    for file in LIBRARY:
        folders = folders_of(file)
        assert not forbidden_imports(file.read_text(), () if "curvax" in folders else folders), file


def test_optimizers_hold_recipes_without_numerics() -> None:
    assert not [file for file in OPTIMIZERS if numerics(file.read_text())]


def test_the_names_written_out_are_those_of_the_files() -> None:
    """For completion and type checkers they stand in both `__init__`."""
    methods = {file.stem[1:] for file in OPTIMIZERS} - {"_init__", "assemble"}
    names = {"assemble", *methods, *(f"scale_by_{name}" for name in methods)}
    assert set(optimizers.__all__) == names <= set(curvax.__all__)
    assert methods == {row.name for row in METHODS}


def test_files_stay_short() -> None:
    assert not [file for file in LIBRARY if len(file.read_text().splitlines()) > 400]


def test_the_rules_can_fail() -> None:
    assert decompositions("y = jnp.linalg.qr(x)[0] @ jax.scipy.linalg.polar(x)") == {"qr", "polar"}
    assert not decompositions("y = jnp.linalg.norm(x)")
    forbidden = ("import transforms", "from curvax import muon", "from .. import muon")
    assert all(forbidden_imports(source, ("transforms",)) for source in forbidden)
    assert not forbidden_imports("from ..transforms._a import b", ("optimizers",))
    assert numerics("from jax import lax") and numerics("y = jnp.sqrt(2)")
    assert not numerics("import jax\nf = jax.tree.map")
