"""What the library needs, and that it reaches for nothing else while it is imported and used."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

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
for make in (curvax.muon, curvax.shampoo, curvax.alice):
    optimizer = make(0.1, rank=2, leading=1) if make is curvax.alice else make(0.1)
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
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CLOSED], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "closed"  # the negative control


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """All that `pyproject.toml` names, without the project itself."""
    extras = project()["optional-dependencies"]
    listed = [*project()["dependencies"], *(x for extra in extras.values() for x in extra)]
    return [r for r in map(Requirement, listed) if r.name != "curvax"]


def test_every_dependency_has_its_license_listed() -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text()
    rows = dict(re.findall(r"(?m)^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|$", table))
    rows.pop("package")
    assert set(rows) == {r.name for r in requirements()}
    assert all(license.strip() for license in rows.values())


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_the_lock_has_every_dependency_with_hashes(requirement: Requirement) -> None:
    lock = (ROOT / ".ci" / "requirements.txt").read_text()
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    assert len(pins) == len(re.findall(r"(?m)^[\w.-]+==", lock))  # none without
    assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_runtime_dependencies_are_jax_and_optax() -> None:
    assert {Requirement(x).name for x in project()["dependencies"]} == {"jax", "optax"}
