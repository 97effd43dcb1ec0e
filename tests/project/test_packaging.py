"""What a user installs: names, files, requirements, and nothing that reaches outside."""

import os
import shutil
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest

from tests.shared.processes import ROOT, run_python

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
    run_python("-c", code, directory, cwd=tree)
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
    said = run_python("-c", IMPORT_ALL, site, cwd=elsewhere, PYTHONPATH=str(site))
    assert said == project["version"]


def test_uninstalled_checkout_imports_from_its_root(checkout: Path) -> None:
    assert run_python("-c", IMPORT_ALL, checkout, cwd=checkout)


# Everything that Python can be asked for outside of its own memory is refused, but for reading the
# sources of what is imported. JAX is loaded, and has compiled something, before.
CLOSED = """
import sys
import jax, jax.numpy as jnp, optax
jax.block_until_ready(jax.jit(lambda x: jnp.linalg.eigh(x @ x.T))(jnp.ones((3, 3))))
seen = []
def hook(event, arguments):
    name = event.split(".")[0]
    # What Python looks into to import a module, and to tell the version of an installed package.
    reads = event == "open" and str(arguments[0]).endswith(
        (".py", ".pyc", ".zip", "-info", "/METADATA", "/PKG-INFO")
    )
    if name in ("socket", "urllib", "http", "ftplib", "subprocess", "pickle", "ctypes") or (
        event in ("open", "os.system", "os.exec", "os.fork", "os.remove", "os.rename", "os.mkdir")
        and not reads
    ):
        seen.append((event, str(arguments)[:80]))
        raise PermissionError(f"{event} {arguments}")
sys.addaudithook(hook)
import curvax
params = {"a": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}}
for make in (curvax.muon, curvax.galore):
    optimizer = make(0.1)
    first = lambda params: optimizer.update(params, optimizer.init(params), params)
    updates, state = jax.jit(first)(params)
    curvax.report(optimizer, params, state)
    curvax.describe_state(optimizer, params)
assert not seen, seen
try:
    import socket
    socket.socket()
except PermissionError:
    print("closed")
"""


def test_nothing_outside_is_asked_for() -> None:
    """While the library is imported and used. The negative control: afterwards it is refused."""
    unset = dict.fromkeys(name for name in os.environ if name.startswith("JAX_"))
    variables = {**unset, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    assert run_python("-c", CLOSED, **variables) == "closed"
