"""What a user installs, and the rules that keep it so: names, layout, imports, file lengths."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest

from tests.sources import imported_names

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = sorted((ROOT / "optimizers").rglob("*.py"))
TRANSFORMS = sorted((ROOT / "transforms").rglob("*.py"))
LIBRARY = [*sorted((ROOT / "curvax").glob("*.py")), *OPTIMIZERS, *TRANSFORMS]

# Imports every module of `curvax` and fails on one that comes from elsewhere, as it does where an
# editable install fills a gap.
IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import curvax
for module in pkgutil.walk_packages(curvax.__path__, "curvax."):
    importlib.import_module(module.name)
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "curvax":
        assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module
assert curvax.__all__
for name in curvax.__all__:
    assert hasattr(curvax, name), name
print(curvax.__version__)
"""


def run_python(code: str, *args: object, cwd: Path, path: Path | None = None) -> str:
    """What `code` prints in a new interpreter; `path` comes before what is installed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def installed_names() -> set[str]:
    """The files that the wheel must hold below `curvax/`, under the names that a user imports."""
    names = {"curvax/py.typed"}
    for file in LIBRARY:
        relative = file.relative_to(ROOT).as_posix()
        names.add(relative if relative.startswith("curvax/") else f"curvax/{relative}")
    return names


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git holds of the library, without what builds and installs leave behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("curvax", "optimizers", "transforms"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


def build(kind: str, tree: Path, directory: Path) -> Path:
    """Call the build backend as pip does, without its isolation, which would need a network."""
    code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    run_python(code, directory, cwd=tree)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(checkout, tree, symlinks=True)
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def test_wheel_installs_curvax_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top, metadata = sorted({PurePosixPath(name).parts[0] for name in names})
    assert top == "curvax"
    assert metadata.startswith("curvax-") and metadata.endswith(".dist-info")
    assert {name for name in names if name.startswith("curvax/")} == installed_names()
    assert f"{metadata}/licenses/LICENSE" in names


@pytest.mark.weekly
def test_wheel_from_the_source_archive_holds_the_same_files(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree, symlinks=True)
    (tmp_path / "sdist").mkdir()
    archive = build("sdist", tree, tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheel").mkdir()
    second = build("wheel", unpacked, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(second).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_wheel_imports_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run_python(IMPORT_ALL, site, cwd=elsewhere, path=site) == project["version"]


def test_wheel_needs_jax_and_optax_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist", [])
    needed = {line.split(">")[0] for line in requirements if "extra ==" not in line}
    assert needed == {"jax", "optax"}


def test_uninstalled_checkout_imports_from_its_root(checkout: Path) -> None:
    assert run_python(IMPORT_ALL, checkout, cwd=checkout)


# Rules for the source, read from the syntax trees.


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


def test_library_imports_itself_relatively_and_never_the_facade() -> None:
    for file in LIBRARY:
        folders = file.relative_to(ROOT).parts[:-1]
        given = () if folders == ("curvax",) else folders
        assert not forbidden_imports(file.read_text(), given), file


def test_optimizers_hold_recipes_without_numerics() -> None:
    assert not [file for file in OPTIMIZERS if numerics(file.read_text())]


def test_files_stay_short() -> None:
    files = [*OPTIMIZERS, *TRANSFORMS]
    assert not [file for file in files if len(file.read_text().splitlines()) > 400]


def test_the_rules_can_fail() -> None:
    forbidden = ("import transforms", "from curvax import muon", "from .. import muon")
    assert all(forbidden_imports(source, ("transforms",)) for source in forbidden)
    assert not forbidden_imports("from ..transforms._a import b", ("optimizers",))
    assert numerics("from jax import lax") and numerics("y = jnp.sqrt(2)")
    assert not numerics("import jax\nf = jax.tree.map")
