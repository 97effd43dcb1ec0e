"""The library reaches for nothing outside while it is imported and used."""

import os
import subprocess
import sys
from pathlib import Path

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
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CLOSED], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "closed"  # the negative control
