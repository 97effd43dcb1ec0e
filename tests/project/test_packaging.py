"""What a user installs: names, files, requirements."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = [*(ROOT / "curvax").glob("*.py")]
LIBRARY += [file for name in ("optimizers", "transforms") for file in (ROOT / name).rglob("*.py")]

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
assert "_read" not in vars(curvax.published.RUNS)  # not at import
assert curvax.published.RUNS["alice/llama-130M"].numbers["rank"] == 256
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
    names = {"curvax/py.typed", "curvax/published.toml"}
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


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip does it, without its isolation, which would need a network."""
    tree, directory = tmp_path_factory.mktemp("build") / "tree", tmp_path_factory.mktemp("wheel")
    shutil.copytree(checkout, tree, symlinks=True)
    code = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    run_python(code, directory, cwd=tree)
    (archive,) = directory.iterdir()
    return archive


def test_wheel_installs_curvax_alone_and_needs_jax_and_optax_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top, metadata = sorted({PurePosixPath(name).parts[0] for name in names})
    assert top == "curvax"
    assert metadata.startswith("curvax-") and metadata.endswith(".dist-info")
    assert {name for name in names if name.startswith("curvax/")} == installed_names()
    assert f"{metadata}/licenses/LICENSE" in names
    said = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(f"{metadata}/METADATA").decode())
    requirements = said.get_all("Requires-Dist", [])
    needed = {line.split(">")[0] for line in requirements if "extra ==" not in line}
    assert needed == {"jax", "optax"}


def test_wheel_imports_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run_python(IMPORT_ALL, site, cwd=elsewhere, path=site) == project["version"]


def test_uninstalled_checkout_imports_from_its_root(checkout: Path) -> None:
    assert run_python(IMPORT_ALL, checkout, cwd=checkout)
